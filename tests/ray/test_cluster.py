"""Starting and ending Ray itself."""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray_world import RayWorld

from runtime.backends.ray import cluster as ray_cluster
from runtime.backends.ray import names
from runtime.backends.ray.cluster import check_socket_length, start_head, stop_head
from runtime.backends.ray.names import BodyName
from runtime.backends.ray.procs import end, session_members
from runtime.errors import RunError
from runtime.paths import RunPaths
from runtime.runs import ProcessMark, mark


@pytest.mark.ray
@pytest.mark.kill
def test_a_head_leaves_nothing_behind() -> None:
    """Start, half of it killed, stop: every process of its session is gone, and the token was for its owner alone."""
    with tempfile.TemporaryDirectory(prefix="hx-") as folder:
        paths = RunPaths(folder=Path(folder) / "run", short=Path(folder) / "s")
        paths.folder.mkdir()
        heard: list[tuple[ProcessMark, ...]] = []
        head = start_head(paths, {"hexdev_a": 1.0}, num_gpus=0, on_started=heard.append)
        session = head.session
        assert session is not None
        assert session != os.getsid(0)
        assert ray_cluster.is_up(head)
        assert len(heard) == 2  # its first process at once, all of them when it is up
        assert paths.ray_token.stat().st_mode & 0o777 == 0o600
        assert head.address.startswith("127.0.0.1:")
        listening = subprocess.run(["cat", "/proc/net/tcp"], capture_output=True, text=True, check=True).stdout
        port = f"{int(head.address.rsplit(':', 1)[1]):04X}"
        assert f"00000000:{port}" not in listening  # never on every interface
        end([head.processes[1]], term_s=0.0)
        assert not ray_cluster.is_up(head)
        assert stop_head(head.processes) == ()
        assert session_members(session) == ()


@pytest.mark.ray
def test_without_the_token_nobody_comes_in(ray_world: RayWorld) -> None:
    """Another process of this machine that has no token cannot connect."""
    env = {k: v for k, v in ray_world.env().items() if not k.startswith("RAY_AUTH")} | {"RAY_AUTH_MODE": "disabled"}
    code = f"from runtime.backends.ray.cluster import connect\nconnect({ray_world.head.address!r}, 'x', token=None, deadline_s=4)"
    done = subprocess.run(
        [os.sys.executable, "-c", code],  # type: ignore[attr-defined]
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode != 0
    assert "RunError" in done.stderr or "DeadlineError" in done.stderr


def test_a_temp_folder_too_deep_for_sockets_is_refused(tmp_path: Path) -> None:
    """Ray would fail obscurely; we say which folder and what to do."""
    deep = tmp_path / ("x" * 60)
    with pytest.raises(RunError, match="XDG_RUNTIME_DIR"):
        check_socket_length(deep)
    check_socket_length(Path("/run/user/1000/hexctl/0123abcd/ray"))


def test_a_reused_pid_is_left_alone() -> None:
    """A mark whose start time does not fit names nobody: the process lives on."""
    child = subprocess.Popen(["sleep", "60"])
    found = mark(child.pid)
    assert found is not None
    assert end([ProcessMark(pid=child.pid, start_ticks=found.start_ticks - 1)], term_s=0.0) == ()
    assert child.poll() is None
    assert end([found], term_s=60.0) == ()
    assert child.wait(60) == -15


ids = st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=20)


@given(role=st.sampled_from(["replica", "trainer"]), id_=ids, epoch=st.integers(0, 10**9), run=ids)
def test_group_names_decode_to_what_they_name(role: names.Role, id_: str, epoch: int, run: str) -> None:
    body = BodyName(role=role, id=id_, epoch=epoch)
    assert names.parse_group(run, names.group_name(run, body)) == body
    assert names.parse_group(run + "x", names.group_name(run, body)) is None


@given(st.lists(st.text(min_size=1, max_size=12), unique=True, max_size=30))
def test_two_devices_never_share_a_resource(device_ids: list[str]) -> None:
    resources = {names.resource(d) for d in device_ids}
    assert len(resources) == len(device_ids)
