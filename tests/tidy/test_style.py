"""The budgets and habits that keep the tree readable; each failure names the place."""

import ast
import io
import os
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ROOTS = [REPOSITORY / "ckptfs", REPOSITORY / "daemon" / "ckptfs_daemon", REPOSITORY / "client" / "ckptfs_client"]
MODULES = sorted(path for root in ROOTS for path in root.rglob("*.py") if "_pb2" not in path.name)
TESTS = sorted((REPOSITORY / "tests").rglob("*.py"))
MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60
SHORT_LINES = 10
SUMMARY_COLUMNS_MAX = 100
FORBIDDEN_MODULES = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
# Verbs of the catalog beside those of queries and mutations: POSIX's own, and those of the journal, attributes and held copies.
CATALOG_VERBS = (
    "create_", "lookup_", "link_", "unlink_", "rmdir_", "rename_", "decrement_", "allocate_", "append_", "strip_", "remove_", "stash_",
    "yield_", "was_", "reset_", "import_", "begin_", "finish_", "separate_", "hold_", "release_", "copy_",
)  # fmt: skip
# The only code that may import a library, or a package of ours; a move edits one line here.
LIBRARY_HOMES: dict[str, tuple[str, ...]] = {
    "sqlite3": ("ckptfs/catalog/", "ckptfs/coherence/"),
    "trio": ("daemon/ckptfs_daemon/",),
    "pyfuse3": ("daemon/ckptfs_daemon/fuse/", "daemon/ckptfs_daemon/mount/"),
    "grpc": ("ckptfs/protocol/", "ckptfs/store/", "ckptfs/peers/", "daemon/ckptfs_daemon/control/", "client/ckptfs_client/"),
    "prometheus_client": ("daemon/ckptfs_daemon/control/",),
    "torch": (),
    "ckptfs_daemon": ("daemon/ckptfs_daemon/",),
    "ckptfs_client": ("client/ckptfs_client/",),
}
# The only code that may hold SQL.
SQL_HOMES = ("ckptfs/catalog/", "ckptfs/coherence/")
# Each has another word here, or none (DESIGN, section "Words").
FORBIDDEN_WORDS = {"blob", "replica", "replicas", "backup", "heal", "finalize", "finalise", "flush"}
# Words and constructions that leave the actor or the meaning open; name the node, process, program or user.
BANNED_PROSE = re.compile(
    r"\b(who|what)(so)?ever\b|\b(some|any|no|every)body\b|\bsomeone\b|\bthose\s+who\b|\bstrangers?\b|\bheirs?\b|\bbells?\b|\bwish(es|ed)?\b"
    r"|\bhears?\b|\bheard\b|\btid(y|ies)\b|\banew\b|\bforever\b|\bin\s+vain\b|\bsuch\s+that\b",
    re.IGNORECASE,
)
# First words of a sentence that is no order.
NO_VERBS = {
    "A", "An", "The", "This", "It", "Its", "All", "Every", "Each", "No", "Nothing", "Some", "One", "Names", "Whether", "What", "Which",
    "Who", "When", "Where", "How", "Why", "If", "In", "Of", "On", "From", "Not", "True", "False", "None",
}  # fmt: skip
# What docstrings may name although other programs define it.
NAMES_OF_OTHERS = {
    "ENOSPC", "FUSE_HAS_RESEND", "executescript", "grpc.ServicerContext", "net.unix.max_dgram_qlen", "run_stepN.cpt", "torch.save",
}  # fmt: skip
# The name that FUSE demands of a handler, and the command `ckptfs lab heal`.
ALLOWED_NAMES = {"flush", "heal"}


def short(path: Path) -> str:
    """The path as a person writes it."""
    return str(path.relative_to(REPOSITORY))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def trees(paths: list[Path]) -> Iterator[tuple[Path, ast.Module]]:
    """Each module with its syntax tree."""
    for path in paths:
        yield path, parse(path)


def functions() -> Iterator[tuple[str, int]]:
    """Every function of the product with its length in lines."""
    for path, tree in trees(MODULES):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                yield f"{short(path)}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1


@pytest.fixture(scope="module", autouse=True)
def _forget_trees() -> Iterator[None]:
    """Millions of objects would slow down the garbage collection of later tests."""
    yield
    parse.cache_clear()


def test_a_module_says_what_it_owns_and_is_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in MODULES}
    assert [short(path) for path, lines in lengths.items() if lines and not ast.get_docstring(parse(path))] == []
    assert [short(path) for path, lines in lengths.items() if lines > MODULE_LINES_MAX] == []
    assert [short(path) for path in MODULES if path.stem in FORBIDDEN_MODULES] == []


def docstrings() -> Iterator[tuple[str, ast.AST, str]]:
    """Every docstring of the product with its place and its node."""
    for path, tree in trees(MODULES):
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
                yield f"{short(path)} {getattr(node, 'name', '')}", node, text


def test_docstrings_begin_with_a_short_line() -> None:
    summaries = [(place, text.partition("\n")[0]) for place, _, text in docstrings()]
    assert [f"{place}: {summary}" for place, summary in summaries if len(summary) > SUMMARY_COLUMNS_MAX] == []


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    """The verb is imperative. That of a constructor may describe its arguments, and that of a property its value."""
    found = []
    for place, node, text in docstrings():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != "__init__":
            is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
            word = re.match(r"[A-Z][a-z]+\b", text)
            is_verb = word is not None and word[0] not in NO_VERBS and not re.search(r"[^s]s$", word[0])
            found += [] if is_verb or is_property else [f"{place}: {text.partition(chr(10))[0]}"]
    assert found == []


def prose(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The docstrings, comments and log messages of a module with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "log":
            strings = [part for argument in node.args for part in ast.walk(argument) if isinstance(part, ast.Constant)]
            yield from ((part.lineno, part.value) for part in strings if isinstance(part.value, str))
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def test_prose_names_the_actors() -> None:
    found = []
    for path, tree in trees(MODULES):
        for line, text in prose(path, tree):
            found += [f"{short(path)}:{line}: {match[0]}" for match in BANNED_PROSE.finditer(text)]
    assert found == []


def defined_names() -> set[str]:
    """The words of the schema, and the names of modules, classes, functions, fields, constants and values."""
    found = set(re.findall(r"\w+", (REPOSITORY / "ckptfs" / "catalog" / "schema.sql").read_text()))
    for path, tree in trees(MODULES):
        found.update(dotted(path).split("."))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            if isinstance(node, ast.Module | ast.ClassDef):
                assigned = [one for one in node.body if isinstance(one, ast.Assign | ast.AnnAssign)]
                targets = [target for one in assigned for target in (one.targets if isinstance(one, ast.Assign) else [one.target])]
                found.update(target.id for target in targets if isinstance(target, ast.Name))
    return found


def test_docstrings_name_what_exists() -> None:
    """A name in backticks is a word of the module's code, or the product defines it. In `ckptfs/series` it is a file of a program."""
    found, defined = [], defined_names()
    for path, tree in trees([path for path in MODULES if not short(path).startswith("ckptfs/series/")]):
        statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
        texts = [node.value for node in statements if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        code = path.read_text()
        for text in texts:
            code = code.replace(text, "")
        known = defined | set(re.findall(r"\w+", code))
        names = [name for text in texts for name in re.findall(r"`([A-Za-z_][\w.]*)`", text) if name not in NAMES_OF_OTHERS]
        found += [f"{short(path)}: {name}" for name in names if not known.issuperset(name.split("."))]
    assert found == []


def test_functions_are_short() -> None:
    assert [f"{name}: {lines} lines" for name, lines in functions() if lines > FUNCTION_LINES_MAX] == []


def test_half_of_the_functions_have_under_ten_lines() -> None:
    lengths = [lines for _, lines in functions()]
    assert sum(lines < SHORT_LINES for lines in lengths) * 2 >= len(lengths)


FLOW = REPOSITORY / "ckptfs" / "flow"
STEPS = sorted({path for path in FLOW.glob("*.py") if path.stem != "__init__"} | set(FLOW.glob("*/__init__.py")))


@pytest.mark.parametrize("path", STEPS, ids=short)
def test_a_step_of_the_flow_says_what_it_takes_and_leaves(path: Path) -> None:
    docstring = ast.get_docstring(parse(path)) or ""
    starts = [line.split(":")[0] for line in docstring.splitlines()[:12]]
    assert [word for word in ("Takes", "Leaves", "If we die here") if word not in starts] == []


def test_names_use_the_words_of_the_design() -> None:
    found = []
    for path, tree in trees(MODULES):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name not in ALLOWED_NAMES:
                words = set(re.sub(r"([A-Z])", r"_\1", node.name).lower().split("_"))
                found += [f"{short(path)}:{node.lineno} {node.name}"] if words & FORBIDDEN_WORDS else []
    assert found == []


@cache
def imports(path: Path) -> set[str]:
    """The top packages that a module imports."""
    found = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize(("package", "homes"), LIBRARY_HOMES.items())
def test_a_library_stays_at_home(package: str, homes: tuple[str, ...]) -> None:
    users = [short(path) for path in MODULES if package in imports(path)]
    assert [user for user in users if not user.startswith(homes or ("none",))] == []


def test_sql_stays_in_the_catalog() -> None:
    kinds = (r"SELECT\s.+\sFROM", r"INSERT\s+(OR\s+\w+\s+)?INTO", r"UPDATE\s+\w+\s+SET", r"DELETE\s+FROM", r"CREATE\s+TABLE", r"PRAGMA\s")
    statement = re.compile(rf"^\s*({'|'.join(kinds)})", re.DOTALL)
    found = []
    for path, tree in trees([path for path in MODULES if not short(path).startswith(SQL_HOMES)]):
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and statement.match(node.value):
                found.append(f"{short(path)}:{node.lineno}")
    assert found == []


def test_no_class_and_no_module_has_the_name_of_another() -> None:
    """A name leads to one place. Entry points, error modules and package faces are named alike on purpose."""
    classes = Counter(node.name for _, tree in trees(MODULES) for node in tree.body if isinstance(node, ast.ClassDef))
    modules = Counter(path.stem for path in MODULES if path.stem not in ("__init__", "__main__", "main", "errors"))
    assert [name for name, count in (classes + modules).items() if count > 1] == []


def dotted(path: Path) -> str:
    """The name under which a module of the product is imported."""
    root = next(root for root in ROOTS if path.is_relative_to(root))
    return ".".join((root.name, *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")


def test_no_modules_import_each_other_in_a_circle() -> None:
    names = {dotted(path) for path in MODULES}
    imported: dict[str, set[str]] = {}
    for path, tree in trees(MODULES):
        found = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        targets = {f"{node.module}.{alias.name}" for node in found for alias in node.names} | {str(node.module) for node in found}
        imported[dotted(path)] = {
            target
            for target in targets & names
            if target != dotted(path) and not any(one.startswith(f"{target}.") for one in targets & names)
        }
    while leaves := {name for name, targets in imported.items() if not targets}:
        imported = {name: targets - leaves for name, targets in imported.items() if name not in leaves}
    assert sorted(imported) == []


QUERIES = ("get_", "list_", "find_", "count_", "load_", "is_", "has_", "can_", "build_", "iterate_", "require_", "check_", "choose_")
MUTATIONS = ("insert_", "mark_", "record_", "set_", "move_", "delete_", "replace_", "restore_", "bump_", "expire_", "migrate_")


def test_a_function_of_the_catalog_is_a_query_or_a_mutation_by_name() -> None:
    """The verb tells whether a call changes the catalog."""
    verbs = QUERIES + MUTATIONS + CATALOG_VERBS
    found = []
    for path, tree in trees([path for path in MODULES if short(path).startswith("ckptfs/catalog/")]):
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not f"{node.name}_".startswith(verbs):
                found.append(f"{short(path)}:{node.lineno} {node.name}")
    assert found == []


def test_no_test_sleeps() -> None:
    """Waiting is `eventually(condition)`: a sleep is either too short or too long."""
    found = []
    for path, tree in trees([path for path in TESTS if "sleep(" in path.read_text()]):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "sleep"):
                found.append(f"{short(path)}:{node.lineno}")
    assert found == []


def test_the_schema_explains_every_column() -> None:
    unexplained, table, above = [], "", ""
    for line in (REPOSITORY / "ckptfs" / "catalog" / "schema.sql").read_text().splitlines():
        if found := re.match(r"CREATE TABLE (\w+)", line):
            table = found[1]
            unexplained += [] if above.startswith("--") else [f"table {table}"]
        elif found := re.match(r"    ([a-z_]+) [A-Z]", line):
            unexplained += [] if "--" in line else [f"{table}.{found[1]}"]
        above = line
    assert unexplained == []


def test_nothing_names_the_place_where_it_was_written() -> None:
    """What is in the tree holds on every machine."""
    private = re.compile(r"(?<![\w$}])/(work|root)/|/tmp/spec|INTERNALS\.md|/opt/wheels|/opt/pypi|debian\.org|pypi\.org|snapshot\.debian")
    found = []
    for directory, directories, files in os.walk(REPOSITORY):
        directories[:] = [name for name in directories if name == ".ci" or not (name.startswith(".") or name == "__pycache__")]
        for path in (Path(directory, name) for name in files if name != ".git"):
            if path.suffix not in (".so", ".pyc") and path != Path(__file__) and path.is_file():
                found += [f"{short(path)}: {match[0]}" for match in private.finditer(path.read_text(errors="replace"))]
    assert found == []
