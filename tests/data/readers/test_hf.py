"""Hugging Face datasets, with a fake package that has the functions we call.

`tests/external/test_hf_datasets.py` reads what the real package saved.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import pytest
from data_examples import encode, noise

from reconv.core.errors import DataError, ExitCode, UsageError
from reconv.data.readers.dataset_factory import open_dataset
from reconv.data.readers.detect import detect
from reconv.recipe.parts.data import DataConfig

DATASETS = """
import base64, json
from pathlib import Path
class Image:
    def __init__(self, decode=True):
        self.decode = decode
class ClassLabel:
    def __init__(self, names):
        self.names = names
class Value:
    pass
class Dataset:
    def __init__(self, features, rows):
        self.features, self.rows = features, rows
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, index):
        assert isinstance(index, int)
        return {name: value for name, value in self.rows[index].items() if name in self.features}
    def select_columns(self, names):
        return Dataset({name: self.features[name] for name in names}, self.rows)
    def cast_column(self, name, feature):
        assert not feature.decode
        return Dataset({**self.features, name: feature}, self.rows)
def load_from_disk(path):
    saved = json.loads((Path(path) / "rows.json").read_text())
    make = {"Image": Image, "Value": Value}
    features = {n: ClassLabel(f) if isinstance(f, list) else make[f]() for n, f in saved["features"].items()}
    rows = saved["rows"]
    for row in rows:
        if row.get("img") and row["img"]["bytes"] is not None:
            row["img"]["bytes"] = base64.b64decode(row["img"]["bytes"])
    return Dataset(features, rows)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "datasets.py").write_text(DATASETS)
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "datasets", raising=False)


def save(root: Path, splits: dict[str, int], names: dict[str, list[str]] | None = None) -> Path:
    """As `save_to_disk` leaves it, except that the rows of the fake package are JSON."""
    for split, count in splits.items():
        (root / split).mkdir(parents=True)
        features = {"id": "Value", "img": "Image", "fine": (names or {}).get(split, ["ant", "bee"])}
        rows = []
        for number in range(count):
            image = base64.b64encode(encode(noise(4, 4, 3, number))).decode()
            rows.append({"id": number, "img": {"bytes": image, "path": None}, "fine": number % 2})
        (root / split / "rows.json").write_text(json.dumps({"features": features, "rows": rows}))
        (root / split / "state.json").write_text(json.dumps({"_fingerprint": f"{split}{count}"}))
    (root / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return root


@pytest.mark.parametrize("val", ["validation", "test"])
@pytest.mark.usefixtures("package")
def test_a_saved_dataset_is_detected_and_its_images_stay_encoded(tmp_path: Path, val: str) -> None:
    root = save(tmp_path / "set", {"train": 5, val: 2})
    assert (detect(root).kind, detect(root).why) == ("hf", "it has dataset_dict.json")
    train, source = (open_dataset("auto", root, split, DataConfig()) for split in ("train", "val"))  # type: ignore[arg-type]
    assert (len(train), len(source)) == (5, 2)
    assert train.class_names == ("ant", "bee")
    assert [train[index].target for index in range(5)] == [0, 1, 0, 1, 0]
    assert train[3].data == encode(noise(4, 4, 3, 3))
    assert source[1].name == f"{root / val}, row 1"
    assert f"split {val}" in source.origin
    assert train.fingerprint() != source.fingerprint()
    with pytest.raises(IndexError):
        train[5]


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = save(tmp_path / "set", {"train": 2, "validation": 2})
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent)])
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    with pytest.raises(UsageError, match="datasets is not installed") as caught:
        open_dataset("auto", root, "train", DataConfig())
    assert caught.value.code == ExitCode.USAGE
    assert caught.value.hint == "pip install 'reconv[hf]'"


@pytest.mark.usefixtures("package")
def test_an_unsuitable_dataset_is_a_data_error(tmp_path: Path) -> None:
    root = save(tmp_path / "a", {"train": 2})
    with pytest.raises(DataError, match=r"no split validation or val or test(.|\n)*its splits are train"):
        open_dataset("auto", root, "val", DataConfig())
    root = save(tmp_path / "b", {"train": 2, "val": 2}, {"val": ["bee", "ant"]})
    with pytest.raises(DataError, match="validation has other classes"):
        open_dataset("auto", root, "val", DataConfig())
    root = save(tmp_path / "c", {"train": 2, "val": 2})
    (root / "train" / "rows.json").write_text("[")
    with pytest.raises(DataError, match=r"cannot open the dataset(.|\n)*JSONDecodeError"):
        open_dataset("auto", root, "train", DataConfig())
    (root / "train" / "rows.json").write_text('{"features": {"img": "Image", "text": "Value"}, "rows": []}')
    with pytest.raises(DataError, match=r"no single column of type ClassLabel(.|\n)*img, text"):
        open_dataset("auto", root, "train", DataConfig())
    (root / "dataset_dict.json").write_text("{}")
    with pytest.raises(DataError, match="list of splits is damaged") as caught:
        open_dataset("auto", root, "train", DataConfig())
    assert caught.value.code == ExitCode.DATA


@pytest.mark.usefixtures("package")
def test_an_external_image_is_read_from_its_path_and_an_empty_cell_is_refused(tmp_path: Path) -> None:
    root = save(tmp_path / "set", {"train": 2, "val": 2})
    (tmp_path / "out.png").write_bytes(encode(noise(4, 4, 3, 9)))
    path = root / "train" / "rows.json"
    saved = json.loads(path.read_text())
    saved["rows"][0]["img"] = {"bytes": None, "path": str(tmp_path / "out.png")}
    saved["rows"][1]["img"] = None
    path.write_text(json.dumps(saved))
    source = open_dataset("auto", root, "train", DataConfig())
    assert source[0].data == encode(noise(4, 4, 3, 9))
    with pytest.raises(DataError, match="row has no image"):
        source[1]
