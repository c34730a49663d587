"""`tools/framework_diff.py` says what changed between two versions of a framework, of all that an adapter uses."""

from __future__ import annotations

import pytest

from tests.framework_diff_tool import load_framework_diff

OLD = {
    "vllm/__init__.py": 'ATTRS = {"LLM": ".entry:LLM"}',
    "vllm/entry.py": "class LLM: ...",
    "vllm/envs.py": 'names = {"VLLM_OLD": 1, "VLLM_BOTH": 2}',
    "vllm/config/__init__.py": "from vllm.config.cache import CacheConfig",
    "vllm/config/cache.py": "class CacheConfig:\n    block_size: int = 16\n    unused: int = 1\n    going: int = 0",
    "vllm/engine/arg_utils.py": "class EngineArgs:\n    model: str = ''",
    "vllm/groups/__init__.py": "from .state import *",
    "vllm/groups/state.py": "def get_group(name: str): ...",
    "vllm/backend.py": (
        "class Base:\n    def build(self, metadata, fast=False): ...\nclass Backend(Base):\n    def name(self): ..."
    ),
    "vllm/utils.py": "if True:\n    def cdiv(a, b): ...\ndef vanishing(): ...",
}
NEW = {
    **OLD,
    "vllm/envs.py": 'names = {"VLLM_NEW": 1, "VLLM_BOTH": 2}',
    "vllm/config/cache.py": "class CacheConfig:\n    block_size: int = 128\n    unused: int = 2\n    coming: str = 'a'",
    "vllm/groups/state.py": "def get_group(name: str, size: int = 1): ...",
    "vllm/backend.py": "class Base:\n    def build(self, metadata, fast=True): ...\nclass Backend(Base): ...",
    "vllm/utils.py": "from vllm.numbers import cdiv",
    "vllm/numbers.py": "def cdiv(a, b): ...",
}
ADAPTER = """
from vllm import LLM
from vllm.backend import Backend
from vllm.config import CacheConfig
from vllm.groups import get_group
from vllm.utils import cdiv, vanishing

def name(config): return config.block_size, config.build
"""


@pytest.fixture(scope="module")
def tool():
    return load_framework_diff()


@pytest.fixture
def versions(tmp_path, tool, monkeypatch):
    """Two versions of a framework, and an adapter that uses some of it."""
    for version, files in (("old", OLD), ("new", NEW), ("adapters", {"vllm/adapter.py": ADAPTER})):
        for name, text in files.items():
            path = tmp_path / version / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    monkeypatch.setattr(tool, "ADAPTERS", tmp_path / "adapters")
    return [str(tmp_path / "old"), str(tmp_path / "new")]


def test_each_kind_of_change_is_one_line(tool, versions, capsys):
    assert tool.main(["vllm", *versions]) == 1
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "names: 6 imported, 6 changes",
        "changed: vllm.backend.Backend.build: (self, metadata, fast=False) is now (self, metadata, fast=True)",
        "gone: vllm.backend.Backend.name",
        "changed: vllm.config.CacheConfig.block_size: int = 16 is now int = 128",
        "changed: vllm.groups.get_group: (name: str) is now (name: str, size: int=1)",
        "moved: vllm.utils.cdiv: from vllm.utils to vllm.numbers",
        "gone: vllm.utils.vanishing",
        "settings: 4 and 4, 4 changes",
        "changed: CacheConfig.block_size (read by our adapter): int = 16 is now int = 128",
        "new: CacheConfig.coming: str = 'a'",
        "gone: CacheConfig.going",
        "changed: CacheConfig.unused: int = 1 is now int = 2",
        "variables: 2 and 2, 2 changes",
        "gone: VLLM_OLD",
        "new: VLLM_NEW",
        "unlisted: 4 in no row of our table",
        *("CacheConfig.coming", "CacheConfig.unused", "VLLM_BOTH", "VLLM_NEW"),
    ]


def test_nothing_changed(tool, versions, capsys):
    assert tool.main(["vllm", versions[0], versions[0]]) == 0
    changes, _, _ = capsys.readouterr().out.partition("unlisted")
    assert [line for line in changes.splitlines() if line.startswith(" ")] == []


def test_what_only_the_framework_fills_in_needs_no_row(tool):
    settings = {
        "CacheConfig.size": "int = 1",
        "CacheConfig.found": "int = field(init=False)",
        "CacheConfig.MOST": "ClassVar[int] = 3",
        "EngineArgs.size": "int = 1",
        "EngineArgs.other": "int = 1",
        "EngineArgs.another": "int = 1",
    }
    found = tool.unlisted(settings, {"VLLM_X"}, {"CacheConfig.size"}, {"EngineArgs.other": "CacheConfig.size"})
    assert found == ["EngineArgs.another", "VLLM_X"]


def test_variables_are_read_anywhere(tool, tmp_path):
    files = {
        "vllm/envs.py": 'names = {"VLLM_LISTED": 1, f"VLLM_{1}": 2}',
        "vllm/model.py": """import os
a = os.environ.get("VLLM_READ")
b = os.environ["VLLM_TAKEN"]
c = os.getenv('VLLM_GOT', "1")
d = "VLLM_ONLY_TOLD"
""",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert tool.Version(tmp_path, "vllm").variables() == {"VLLM_LISTED", "VLLM_READ", "VLLM_TAKEN", "VLLM_GOT"}


def test_a_folder_without_the_framework(tool, versions, capsys, tmp_path):
    with pytest.raises(SystemExit):
        tool.main(["sglang", *versions])
    assert "has no package 'sglang': name an environment" in capsys.readouterr().err


SGLANG = {
    "sglang/__init__.py": "",
    "sglang/srt/server_args.py": "class PortArgs:\n    nccl_port: int",
    "sglang/srt/arg_groups/fields/model.py": (
        "class Model:\n    _NS_PATH = 'model'\n    model_path: A[str, 'help'] = ''\n"
        "    rank: A[int, Derived(fn='x')] = 0"
    ),
    "sglang/srt/configs/model_config.py": "class ModelConfig:\n    def __init__(self, model_path: str): ...",
    "sglang/srt/environ.py": "class Envs:\n    SGLANG_DECLARED = EnvBool(False)",
    "sglang/srt/models/new.py": "fast = get_bool_env_var('SGLANG_READ_ONLY_HERE')",
}


def test_sglangs_settings_are_found_wherever_they_are(tool, tmp_path):
    for name, text in SGLANG.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    version = tool.Version(tmp_path, "sglang")
    assert version.settings() == {
        "PortArgs.nccl_port": "int",
        "ServerArgs.model_path": "A[str, 'help'] = ''",
        "ModelConfig.model_path": "str",
    }
    assert version.variables() == {"SGLANG_DECLARED", "SGLANG_READ_ONLY_HERE"}


def test_settings_without_a_row_are_listed(tool, tmp_path, capsys):
    for name, text in SGLANG.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    tool.main(["sglang", str(tmp_path), str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    unlisted = lines[lines.index("unlisted: 2 in no row of our table") + 1 :]
    assert unlisted == ["  SGLANG_DECLARED", "  SGLANG_READ_ONLY_HERE"]
