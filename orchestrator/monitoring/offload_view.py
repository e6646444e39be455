"""What a plan keeps in host memory, and whether its copies are hidden, as text."""

from __future__ import annotations

from pentad.orchestrator.planning.formatting import format_percent
from pentad.schedules.simulate.copy_slack import hidden_share
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.spec.plan import Plan


def offload_facts(plan: Plan, costs: Costs) -> dict[str, str]:
    """Facts for the table of `pentad plan`, by name; empty without offloading."""
    found = dict[str, str]()
    if any(plan.offload):
        shares = [max(plan.offload[unit] for unit in held) for held in plan.program.placement]
        hidden = _by_rank(hidden_share(plan.program, costs))
        found["offload"] = f"{_by_rank(shares)} of saved activations, in copies of which compute hides {hidden}"
    if plan.host_optimizer:
        found["optimizer"] = "master weights and moments in host memory"
    return found


def _by_rank(shares: list[float]) -> str:
    """One figure for pipeline ranks that all have the same."""
    texts = [format_percent(share) for share in shares]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)
