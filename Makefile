# The commands of bootstrap.sh: `make demo`, `make test ARGS="tests/unit"`, `make install PREFIX=/opt/ckptfs`.
.PHONY: setup demo test lint bench install uninstall
setup demo test lint bench install uninstall:
	PREFIX="$(or $(PREFIX),/opt/ckptfs)" ./bootstrap.sh $@ $(ARGS)
