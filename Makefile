# The commands of bootstrap.sh: `make demo`, `make test ARGS="tests/unit"`, `make install PREFIX=/opt/ckptfs`. `make` alone lists them.
.PHONY: help setup demo test lint bench install uninstall deb deb-test
help setup demo test lint bench install uninstall deb deb-test:
	@PREFIX="$(or $(PREFIX),/opt/ckptfs)" ./bootstrap.sh $@ $(ARGS)
