"""Generator of the stubs: `python -m ckptfs.protocol.generate` writes them next to each .proto file.

The stubs are committed, because only the generator needs grpcio-tools.
"""

import re
from importlib import resources
from pathlib import Path


def main() -> None:
    """Generate NAME_pb2.py, NAME_pb2.pyi and NAME_pb2_grpc.py for each NAME.proto."""
    import grpc_tools
    from grpc_tools import protoc

    directory = Path(__file__).parent
    included = str(resources.files(grpc_tools) / "_proto")
    outputs = [f"--{kind}_out={directory}" for kind in ("python", "pyi", "grpc_python")]
    for proto in sorted(directory.glob("*.proto")):
        if protoc.main(["protoc", f"-I{directory}", f"-I{included}", *outputs, proto.name]) != 0:
            raise SystemExit(f"protoc failed on {proto.name}")
        stub = directory / f"{proto.stem}_pb2_grpc.py"
        # protoc writes an absolute import, which finds no module inside a package.
        stub.write_text(re.sub(r"^import (\w+_pb2) as", r"from ckptfs.protocol import \1 as", stub.read_text(), flags=re.MULTILINE))


if __name__ == "__main__":
    main()
