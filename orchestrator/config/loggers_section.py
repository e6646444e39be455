"""The sections of loggers and of metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from pentad.orchestrator.config.errors import Broken
from pentad.orchestrator.config.sections import CountOrZero, Port, Section, Text

MOST_PROFILES = 16  # each with less than 1 MB a rank


class WandbSection(Section):
    """Weights & Biases. `wandb login` or WANDB_API_KEY gives the key; without one, or without a network, a run logs
    offline."""

    project: Text = Field(default="pentad", description="project of the run")
    entity: Text | None = Field(default=None, description="user or team; null: that of the key")
    mode: Literal["online", "offline"] = "online"
    """offline: log only to the wandb folder of the run, for `wandb sync`"""


class MlflowSection(Section):
    """MLflow."""

    tracking_uri: Text | None = None
    """address of the tracking server; null: MLFLOW_TRACKING_URI, or the folder mlruns in run.folder"""
    experiment: Text = Field(default="pentad", description="experiment of the run")


class LoggersSection(Section):
    """Where metrics go beside the run's folder (docs/observability.md)."""

    use: list[Literal["csv", "tensorboard", "wandb", "mlflow"]] = Field(default=[], description="loggers of the run")
    wandb: WandbSection | None = Field(default=None, description="settings of that logger; null: the defaults")
    mlflow: MlflowSection | None = Field(default=None, description="settings of that logger; null: the defaults")

    def settings(self, kind: str) -> dict[str, Any]:
        """The section of one logger, with its defaults."""
        sections: dict[str, type[Section]] = {"wandb": WandbSection, "mlflow": MlflowSection}
        return (getattr(self, kind) or sections[kind]()).model_dump() if kind in sections else {}

    def rules(self) -> Iterator[Broken | str]:
        if len(set(self.use)) < len(self.use):
            yield Broken("use", "each logger once")
        for kind in ("wandb", "mlflow"):
            if getattr(self, kind) is not None and kind not in self.use:
                yield f"loggers.{kind} has keys, but loggers.use is {self.use}: expected {kind} in loggers.use"


class MetricsSection(Section):
    """Metrics, timelines and remote control (docs/observability.md)."""

    port: Port = Field(default=0, description="port of the Prometheus exporter; 0: a free one")
    host: Text = "127.0.0.1"
    """address on which the exporter, the control service and the run's page listen"""
    control_port: Port = Field(default=0, description="port of the control service; 0: a free one")
    page_port: Port = Field(default=0, description="port of the run's page; 0: a free one")
    timeline_steps: CountOrZero = Field(default=5, description="last steps whose measured timeline is kept")
    profile_steps: list[CountOrZero] = Field(default=[], max_length=MOST_PROFILES)
    """steps in which ranks run torch's profiler, for `pentad timeline RUN --profile`"""

    def step_rules(self, steps: int) -> Iterator[Broken]:
        """Profiled steps must be among the run's, 0 to `steps` - 1."""
        if max(self.profile_steps, default=0) >= steps:
            yield Broken("metrics.profile_steps", f"steps below run.steps = {steps}")
