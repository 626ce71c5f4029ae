"""huggingface_hub and the stand-in of the tests speak the same interface, and it reads what `reconv push` has uploaded.

Needs: pip install huggingface_hub
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hub_server import TOKEN, Hub, serve_hub
from safetensors.torch import load_file, save_file

import reconv
from reconv.exporters.hub import push
from reconv.models import build_model

UPLOAD = """
import sys
from huggingface_hub import HfApi
api = HfApi()
api.create_repo("me/theirs", private=True)
api.upload_folder(repo_id="me/theirs", folder_path=sys.argv[1], commit_message="by huggingface_hub")
print(sorted(api.list_repo_files("me/theirs")))
"""
DOWNLOAD = """
from huggingface_hub import hf_hub_download
for name in ("model.safetensors", "config.json", "README.md"):
    print(hf_hub_download("me/ours", name))
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    pytest.importorskip("huggingface_hub", reason="pip install huggingface_hub")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("RECONV_CACHE", str(tmp_path / "cache"))
    with serve_hub() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.address)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        yield served


def in_process(script: str, *arguments: str) -> str:
    """The output of a script; huggingface_hub reads its variables when it is imported."""
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_what_huggingface_hub_uploads_is_loaded(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    state = build_model("resnet18", num_classes=3, seed=2).state_dict()
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(
        '{"architecture": "resnet18", "num_classes": 3, "label_names": ["a", "b", "c"]}'
    )
    assert "model.safetensors" in in_process(UPLOAD, str(folder))
    assert hub.private == {"me/theirs"} and hub.commits == ["by huggingface_hub"]
    model = reconv.load("hf://me/theirs", device="cpu")
    assert model.classes == ("a", "b", "c")
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.module.state_dict().items())


def test_what_is_pushed_is_read_by_huggingface_hub(hub: Hub, tmp_path: Path) -> None:
    run = reconv.train("quickstart", out=tmp_path / "run", epochs=1, device="cpu").folder
    push(run, "hf://me/ours")
    weights, config, card = map(Path, in_process(DOWNLOAD).splitlines())
    [checkpoint] = (run / "checkpoints").iterdir()
    ours, theirs = load_file(checkpoint / "model.safetensors"), load_file(weights)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert '"architecture": "resnet8_cifar"' in config.read_text() and "# ours" in card.read_text()
