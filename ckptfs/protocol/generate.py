"""Writes the Python stubs of control.proto beside it: `python -m ckptfs.protocol.generate` (the generated files are committed).

Needs grpcio-tools, which users do not. If we die here: run it again.
"""

import re
from importlib import resources
from pathlib import Path


def main() -> None:
    """Generate control_pb2.py, control_pb2_grpc.py and the types of the first."""
    import grpc_tools
    from grpc_tools import protoc

    here = Path(__file__).parent
    included = str(resources.files(grpc_tools) / "_proto")
    outputs = [f"--{kind}_out={here}" for kind in ("python", "pyi", "grpc_python")]
    arguments = ["protoc", f"-I{here}", f"-I{included}", *outputs, "control.proto"]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")
    stub = here / "control_pb2_grpc.py"
    # protoc writes an absolute import, which does not find a module inside a package.
    stub.write_text(re.sub(r"^import control_pb2 as", "from ckptfs.protocol import control_pb2 as", stub.read_text(), flags=re.MULTILINE))


if __name__ == "__main__":
    main()
