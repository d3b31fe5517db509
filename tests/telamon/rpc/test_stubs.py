"""The committed stubs are what proto/ says."""

from pathlib import Path

from grpc_tools import protoc

import telamon

ROOT = Path(__file__).parents[3]
STUBS = Path(telamon.__file__).parent / "rpc/v1"


def test_generating_again_gives_the_committed_files(tmp_path: Path) -> None:
    out = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    assert protoc.main(["protoc", f"-I{ROOT / 'proto'}", *out, "telamon/rpc/v1/replay.proto"]) == 0
    generated = {path.name: path.read_bytes() for path in (tmp_path / "telamon/rpc/v1").iterdir()}
    committed = {path.name: path.read_bytes() for path in STUBS.glob("replay_pb2*")}
    assert generated.keys() == committed.keys()
    assert len(committed) == 3
    for name, content in generated.items():
        assert content == committed[name], f"telamon/rpc/v1/{name} is out of date; run `make proto`"
