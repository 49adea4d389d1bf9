"""Input is never executed: our code does not unpickle, evaluate or pass to a shell anything that it reads."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
UNPICKLING = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
BUILT_IN = {"__import__", "eval", "exec"}
CALLS = {"os.popen", "os.system", "subprocess.getoutput", "subprocess.getstatusoutput", "tempfile.mktemp"}
OBJECTS = {  # collectives that pickle
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
YAML = {"yaml.full_load", "yaml.load", "yaml.unsafe_load"}
EXCEPTIONS = {
    ("src/megabatch/models/weights.py", "import pickle"): "names the error of torch.load(weights_only=True)",
    ("src/megabatch/data/pipeline/decoder_process.py", "import pickle"): "a socket pair of a rank and its child",
    ("src/megabatch/data/pipeline/decoder_process.py", "import multiprocessing.connection"): "the same",
    ("lab/megabatch_lab/bench/input.py", "import multiprocessing"): "pipes between a process and its children",
}


def found_in(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
            yield from (
                f"import {name}" for name in names if name.partition(".")[0] in UNPICKLING | {"multiprocessing"}
            )
        elif isinstance(node, ast.Call):
            yield from found_in_call(node)
        if isinstance(node, ast.Attribute | ast.Name | ast.alias):
            name = node.name if isinstance(node, ast.alias) else ast.unparse(node).rpartition(".")[2]
            yield from [name] if name in OBJECTS else []


def found_in_call(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name in BUILT_IN | CALLS | YAML:
        yield f"{name}()"
    if name == "torch.load" and given.get("weights_only") != "True":
        yield "torch.load() without weights_only=True"
    yield from (f"{key}={given[key]}" for key in ("allow_pickle", "shell") if given.get(key, "False") != "False")


def test_our_code_does_not_unpickle_evaluate_or_call_a_shell() -> None:
    paths = [path for folder in ("src", "lab", "tools") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) > 200
    found = {(str(path.relative_to(ROOT)), what) for path in paths for what in found_in(path.read_text())}
    assert found == EXCEPTIONS.keys()


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("from pickle import loads", "import pickle"),
        ("import torch.multiprocessing, multiprocessing.pool", "import multiprocessing.pool"),
        ("dist.all_gather_object(found, own)", "all_gather_object"),
        ("from torch.distributed import broadcast_object_list as send", "broadcast_object_list"),
        ("torch.load(path, map_location='cpu')", "torch.load() without weights_only=True"),
        ("torch.load(path, weights_only=False)", "torch.load() without weights_only=True"),
        ("np.load(path, allow_pickle=is_old)", "allow_pickle=is_old"),
        ("yaml.load(text)", "yaml.load()"),
        ("eval(text)", "eval()"),
        ("subprocess.run(line, shell=True)", "shell=True"),
    ],
)
def test_code_that_executes_input_is_found(code: str, what: str) -> None:
    assert what in found_in(code)


@pytest.mark.parametrize(
    "code",
    ["model.eval()", "torch.load(path, weights_only=True)", "np.load(path, allow_pickle=False)", "ctypes.py_object(a)"],
)
def test_code_that_does_not_execute_input_is_allowed(code: str) -> None:
    assert [*found_in(code)] == []
