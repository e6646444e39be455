"""What the benchmark reports about a profiled step."""

from step_kernels import REST, longest_kernels, step_kernels

from pentad.schedules.simulate.step_profile import KERNEL, OPERATOR, ProfileEvent

MILLISECOND = 1_000_000


def event(name: str, start: float, length: float, track: int = 7, kind: str = KERNEL) -> ProfileEvent:
    return ProfileEvent(kind, name, "0F0", "F", track, round(start * MILLISECOND), round(length * MILLISECOND))


EVENTS = [
    event("aten::mm", 0, 50, kind=OPERATOR),
    event("nvjet_tst_128x256", 2, 3),
    event("_forward", 5, 1),
    event("ncclDevKernel_ReduceScatter", 4, 8, track=20),
    event("nvjet_tst_128x256", 8, 2),
    event("Memcpy PtoP", 13, 1, track=21),
]


def test_each_kernel_is_of_one_kind_and_what_overlaps_counts_twice():
    found = step_kernels(EVENTS)
    assert found == {
        **{"copies": 1.0, "collectives": 8.0, "attention": 0.0, "products": 5.0, "optimizer": 0.0, REST: 1.0},
        **{"step": 12.0, "no compute": 6.0},  # from 2 to 14; 6 to 8 and 10 to 14
    }


def test_launches_of_a_kernel_are_added_up():
    assert longest_kernels(EVENTS, most=2) == {"ncclDevKernel_ReduceScatter": 8.0, "nvjet_tst_128x256": 5.0}


def test_a_step_without_kernels_has_no_times():
    assert step_kernels([EVENTS[0]]) == longest_kernels([EVENTS[0]]) == {}
