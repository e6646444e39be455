"""Arrow arrays built from buffers equal those that pyarrow builds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.ir.arrow_arrays import NUMBERS, filled_array

of_kind = {
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float64(): st.floats(allow_nan=False),
    pa.string(): st.text(st.characters(exclude_categories=["Cs"])),
}


@pytest.mark.parametrize("kind", of_kind, ids=str)
@given(st.data())
def test_arrays_are_those_of_pyarrow(kind: pa.DataType, data: Any) -> None:
    values = data.draw(st.lists(of_kind[kind], max_size=9))
    found = filled_array(iter(values), kind)
    found.validate(full=True)
    assert found.equals(pa.array(values, kind)) and found.type == kind and found.null_count == 0


@pytest.mark.parametrize("kind", NUMBERS, ids=str)
def test_arrays_of_numbers_may_be_views_of_others(kind: pa.DataType) -> None:
    every_second = np.arange(8)[::2]
    assert filled_array(every_second, kind).to_pylist() == [0, 2, 4, 6]
