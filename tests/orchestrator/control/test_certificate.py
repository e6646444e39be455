"""The control service uses TLS if other machines can reach it."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from controls import serving

from pentad.orchestrator.control import control_client
from pentad.orchestrator.control.control_client import Client, NotLive
from pentad.orchestrator.control.server import ControlServer
from pentad.orchestrator.monitoring.run_state import ControlRequests
from pentad.schedules.ir.errors import PentadError


def test_other_machines_are_answered_by_tls_and_know_the_service_by_its_certificate(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing else is accepted: neither plain text, nor the certificate of another service."""
    (tmp_path / "other").mkdir()
    with (
        closing(ControlServer(tmp_path, "0.0.0.0", 0, ControlRequests())),
        closing(ControlServer(tmp_path / "other", "0.0.0.0", 0, ControlRequests())),
    ):
        endpoint, other = (json.loads((path / "control.json").read_text()) for path in (tmp_path, tmp_path / "other"))
        with Client(tmp_path, endpoint) as client:
            assert client.status()["state"] == "starting"
        plain_text = {key: value for key, value in endpoint.items() if key != "certificate"}
        for wrong in (plain_text, {**endpoint, "certificate": other["certificate"]}):
            with Client(tmp_path, wrong) as client, pytest.raises(grpc.RpcError) as refused:
                client._call("GetStatus", 2.0)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        with (
            Client(tmp_path, {**endpoint, "certificate": other["certificate"]}) as client,
            pytest.raises(PentadError, match=r"has a certificate that .* does not have: expected") as found,
        ):
            client.status()
        assert not isinstance(found.value, NotLive), "the run is not over"
        for damaged in ("", 7, endpoint["certificate"][:300]):
            (tmp_path / "control.json").write_text(json.dumps({**endpoint, "certificate": damaged}))
            with pytest.raises(PentadError, match=r"control.json is damaged: expected address and token"):
                control_client._endpoint(tmp_path)
    capfd.readouterr()  # grpc's complaints


def test_loopback_needs_no_certificate(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        assert "certificate" not in served.endpoint
