"""Writes the Python stubs of every .proto here beside it: `python -m ckptfs.protocol.generate` (the generated files are committed).

Needs grpcio-tools, which users do not. If we die here: run it again.
"""

import re
from importlib import resources
from pathlib import Path


def main() -> None:
    """Generate NAME_pb2.py, NAME_pb2_grpc.py and the types of the first, for each NAME.proto."""
    import grpc_tools
    from grpc_tools import protoc

    here = Path(__file__).parent
    included = str(resources.files(grpc_tools) / "_proto")
    outputs = [f"--{kind}_out={here}" for kind in ("python", "pyi", "grpc_python")]
    for proto in sorted(here.glob("*.proto")):
        if protoc.main(["protoc", f"-I{here}", f"-I{included}", *outputs, proto.name]) != 0:
            raise SystemExit(f"protoc failed on {proto.name}")
        stub = here / f"{proto.stem}_pb2_grpc.py"
        # protoc writes an absolute import, which does not find a module inside a package.
        stub.write_text(re.sub(r"^import (\w+_pb2) as", r"from ckptfs.protocol import \1 as", stub.read_text(), flags=re.MULTILINE))


if __name__ == "__main__":
    main()
