"""A review from end to end: its evidence, the list that recipes take, and input that is broken."""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from review_examples import CLASSES, picture, write_photos, write_predictions

import reconv
from reconv.cli import main
from reconv.cli.options import parse_settings
from reconv.core.errors import CheckpointError
from reconv.data.dataset import all_targets, sample_paths
from reconv.data.readers.dataset_factory import open_dataset
from reconv.data.readers.digits import open_digits
from reconv.inference.predictor import Predictor
from reconv.recipe.loader import load
from reconv.recipe.parts.data import DataConfig
from reconv.review.images import open_images
from reconv.review.network import FeatureNetwork
from reconv.review.run import Review, ReviewOptions, review

QUICK = [("length", "60step", "test"), ("schedule.warmup", "5step", "test")]


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(args)
    return int(end.value.code or 0)


def reviewed(source: Path | str, out: Path, **options: object) -> tuple[Review, list[str]]:
    lines: list[str] = []
    result = review(ReviewOptions(str(source), out, **options), lines.append)  # type: ignore[arg-type]
    return result, lines


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8", errors="surrogateescape") as lines:
        return list(csv.DictReader(lines))


def flip_digits(file: Path, num_flips: int = 120) -> tuple[set[str], DataConfig]:
    """A list that gives some training digits another class; their names, and the data with it."""
    digits, rng = open_digits("train"), np.random.default_rng(0)
    chosen = rng.permutation(len(digits))[:num_flips].tolist()
    lines = [f"digits[{i}],train,relabel,{(digits[i].target + 1 + n % 8) % 10}" for n, i in enumerate(chosen)]
    file.write_text("\n".join(["path,split,action,label", *lines, ""]))
    return {f"digits[{i}]" for i in chosen}, DataConfig(source="digits", relabel=str(file))


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    file = tmp_path_factory.mktemp("noisy") / "flips.csv"
    return file, flip_digits(file)[0]


def precision_and_recall(result: Review, flips: set[str]) -> tuple[float, float]:
    likely = {result.images.paths[f.row] for f in result.findings if f.kind == "label" and f.score >= 0.5}
    return len(likely & flips) / len(likely), len(likely & flips) / len(flips)


def test_folds_find_flipped_labels_and_the_list_corrects_them(noisy: tuple[Path, set[str]], tmp_path: Path) -> None:
    file, flips = noisy
    overrides = [*QUICK, ("data.relabel", str(file), "test")]
    result, lines = reviewed("digits", tmp_path / "out", folds=2, overrides=overrides, accept_above=0.5)
    precision, recall = precision_and_recall(result, flips)
    assert precision >= 0.8 and recall >= 0.8
    assert sum("of 2: top1" in line for line in lines) == 2
    truth, data = open_digits("train"), DataConfig(source="digits", relabel=str(file))
    before = all_targets(open_dataset("digits", None, "train", data))
    both = tmp_path / "both.csv"
    accepted = [
        r for r in rows_of(tmp_path / "out" / "review.csv") if r["action"] == "relabel" and r["split"] == "train"
    ]
    lines = [f"{r['path']},{r['split']},relabel,{r['label']}" for r in accepted]
    both.write_text(file.read_text() + "\n".join(lines) + "\n")
    after = all_targets(open_dataset("digits", None, "train", data.model_copy(update={"relabel": str(both)})))
    assert (after != truth.targets).sum() < 0.5 * (before != truth.targets).sum()
    again, lines = reviewed("digits", tmp_path / "out", folds=2, overrides=overrides)
    assert all("trained before" in line for line in lines if "of 2" in line)
    assert [(f.row, f.score) for f in again.findings] == [(f.row, f.score) for f in result.findings]
    _, lines = reviewed("digits", tmp_path / "out", folds=2, overrides=[*overrides, ("seed", 1, "test")])
    assert not any("trained before" in line for line in lines)


def test_checkpoints_of_a_run_rank_flipped_labels_first(noisy: tuple[Path, set[str]], tmp_path: Path) -> None:
    file, flips = noisy
    settings = {"data.relabel": str(file), "length": "80step", "save.keep_at": ["30%", "60%"], "evaluate.every": "100%"}
    learned = reconv.train("quickstart", out=tmp_path / "run", overrides=settings).folder
    result, lines = reviewed(learned, tmp_path / "out")
    assert result.evidence.method.startswith("4 checkpoints")
    assert any("--folds 5" in line for line in lines)
    ranked = [result.images.paths[f.row] for f in result.findings if f.kind == "label"][: len(flips) // 2]
    assert len(set(ranked) & flips) >= 0.9 * len(ranked)
    heads, _ = reviewed("digits", tmp_path / "heads", run=str(learned), overrides=[("data.relabel", str(file), "test")])
    assert precision_and_recall(heads, flips)[0] >= 0.8
    assert heads.evidence.method == f"features of {learned}, with a head for each of 5 folds"
    table = tmp_path / "predictions.csv"
    reconv.evaluate(learned, split="train", predictions=table)
    read, lines = reviewed(learned, tmp_path / "table", predictions=(table,))
    assert any(line.startswith("predictions of 1,437 of 1,797 images") for line in lines)
    assert precision_and_recall(read, flips)[0] >= 0.8


def test_one_network_while_it_learns_takes_one_training(noisy: tuple[Path, set[str]], tmp_path: Path) -> None:
    file, flips = noisy
    overrides = [*QUICK, ("data.relabel", str(file), "test")]
    result, _ = reviewed("digits", tmp_path, folds=1, overrides=overrides)
    assert result.evidence.method.startswith("5 checkpoints")
    ranked = [result.images.paths[f.row] for f in result.findings if f.kind == "label"][: len(flips) // 2]
    assert len(set(ranked) & flips) >= 0.9 * len(ranked)


def test_weights_judge_any_data_by_their_features(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos")
    small = {
        "model.name": "resnet8_cifar",
        "data.preprocess.size": 32,
        "length": "2step",
        "derive": [],
        "engine.num_threads": 1,
    }
    weights = reconv.train(
        "finetune", data=photos, out=tmp_path / "run", overrides=small | {"schedule.lr": 0.01}
    ).folder
    first, _ = reviewed(photos, tmp_path / "a", init=str(weights), folds=3)
    assert first.evidence.features is not None and first.evidence.features.shape[0] == 48
    assert first.scores is not None and np.isfinite(first.scores.wrong).all()


def test_copies_and_leaks_are_listed_with_the_image_to_leave_out(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos")
    original = Image.open(photos / "val" / "cat" / "0.png")
    original.resize((56, 56)).save(photos / "train" / "dog" / "leak.jpg", quality=70)
    Image.open(photos / "train" / "owl" / "3.png").save(photos / "train" / "owl" / "again.png")
    table = write_predictions(tmp_path / "p.csv", photos, {"train/cat/1.png": "owl"})
    result, _ = reviewed(photos, tmp_path / "out", predictions=(table,), accept_above=0.8)
    rows = {(row["kind"], row["path"]): row for row in rows_of(tmp_path / "out" / "review.csv")}
    leak, copy = rows["leak", "train/dog/leak.jpg"], rows["copy", "train/owl/again.png"]
    assert leak["other"] == "val/cat/0.png" and leak["note"].endswith("which is labeled cat")
    assert (copy["other"], copy["score"]) == ("train/owl/3.png", "1.0000")
    label = rows["label", "train/cat/1.png"]
    assert (label["action"], label["label"], label["given"]) == ("relabel", "owl", "cat")
    assert result.counts() == {"label": 1, "leak": 1, "copy": 1, "box": 0, "outlier": 0, "unreadable": 0}
    listed = str(tmp_path / "out" / "review.csv")
    train = open_dataset("auto", photos, "train", DataConfig(exclude=listed, relabel=listed))
    names = [Path(path).relative_to(photos).as_posix() for path in sample_paths(train)]
    assert len(names) == 36 and not {"train/dog/leak.jpg", "train/owl/again.png"} & set(names)
    assert all_targets(train)[names.index("train/cat/1.png")] == CLASSES.index("owl")
    reviewed(photos, tmp_path / "out", predictions=(table,))
    assert {row["action"] for row in rows_of(tmp_path / "out" / "review.csv")} == {""}  # nothing without --accept-above
    assert len(open_dataset("auto", photos, "train", DataConfig(exclude=listed))) == 38


def test_names_of_all_kinds_and_unreadable_images_pass_through(tmp_path: Path) -> None:
    classes = ("<b>&cat", "søvn 猫", "line\nbreak")
    photos = write_photos(tmp_path / "photos", num_train=4, num_val=2, classes=classes)
    broken = photos / "train" / classes[0] / 'a,"b"\n<i>.png'
    broken.write_bytes(b"no image")
    raw = photos.joinpath("train", classes[1]).as_posix().encode() + b"/\xff.png"
    picture(900).save(photos / "x.png")
    (photos / "x.png").rename(raw.decode("utf-8", "surrogateescape"))
    suspect = (photos / "train" / classes[1] / "\udcff.png").relative_to(photos).as_posix()
    table = write_predictions(tmp_path / "p.csv", photos, {suspect: classes[2]}, classes=classes)
    command = ["data", "review", str(photos), "--predictions", str(table), "--out", str(tmp_path / "out")]
    assert run(*command, "--accept-above", "0.5", "--export", "label-studio") == 0
    rows = {row["path"]: row for row in rows_of(tmp_path / "out" / "review.csv")}
    assert rows[broken.relative_to(photos).as_posix()]["kind"] == "unreadable"
    assert rows[suspect]["label"] == classes[2]
    listed = str(tmp_path / "out" / "review.csv")
    train = open_dataset("auto", photos, "train", DataConfig(exclude=listed, relabel=listed))
    assert len(train) == 13 and sorted(np.bincount(all_targets(train)).tolist()) == [4, 4, 5]
    page = (tmp_path / "out" / "review.html").read_text(encoding="utf-8")
    assert "<b>&cat" not in page and "<i>.png" not in page and "&lt;b&gt;&amp;cat" in page


def test_one_class_is_checked_for_copies_alone(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", classes=("cat",))
    picture(0).save(photos / "train" / "cat" / "again.png")
    result, lines = reviewed(photos, tmp_path / "out")
    assert "there is one class: labels are not judged" in lines
    assert [finding.kind for finding in result.findings] == ["copy"]
    assert [row.shortage for row in result.classes] == [
        "13 for training (the median class has 13); 4 for validation, of 10 or more"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["empty"], "empty is empty"),
        (["nosuch"], "nosuch"),
        (["flat"], "flat"),
        (["photos", "--predictions", "other.csv"], "is no class of the data"),
        (["photos", "--predictions", "columns.csv"], "needs the columns"),
        (["photos", "--predictions", "numbers.csv"], "score and loss are numbers"),
        (["photos", "--predictions", "negative.csv"], "losses from 0 on"),
        (["photos", "--predictions", "short.csv"], "fewer cells than the header"),
        (["photos", "--predictions", "long.csv"], "not CSV"),
        (["photos", "--predictions", "elsewhere.csv"], "none of the predictions"),
        (["photos", "--init", "w.pth", "--run", "r"], "two kinds of evidence"),
        (["photos", "--init", "w.pth", "--folds", "1"], "--folds 1 trains one network"),
        (["photos", "--out", "photos/review"], "is inside the data"),
        (["digits", "--predictions", "digits.csv", "--export", "coco"], "no files"),
    ],
)
def test_what_cannot_be_reviewed_is_an_error_that_says_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: Sequence[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_photos(tmp_path / "photos", num_train=2, num_val=1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "flat").mkdir()
    picture(1).save(tmp_path / "flat" / "a.png")
    head = "path,target,predicted,score,loss,split\n"
    (tmp_path / "other.csv").write_text(head + "a,cow,cat,0.5,1,train\n")
    (tmp_path / "columns.csv").write_text("path,target\na,cat\n")
    (tmp_path / "numbers.csv").write_text(head + "a,cat,cat,high,1,train\n")
    (tmp_path / "negative.csv").write_text(head + "photos/train/cat/0.png,cat,cat,0.5,-1000,train\n")
    (tmp_path / "short.csv").write_text("path,score,loss,split,predicted,target\na,0.5,1,train\n")
    (tmp_path / "long.csv").write_text(head + "a" * 200_000 + ",cat,cat,0.5,1,train\n")
    (tmp_path / "elsewhere.csv").write_text(head + "a,cat,cat,0.5,1,train\n")
    (tmp_path / "digits.csv").write_text(head + "digits[0],1,2,0.9,5,train\n")
    assert run("data", "review", *arguments) != 0
    assert message in " ".join(capsys.readouterr().err.split())


def test_rows_follow_the_splits() -> None:
    images = open_images(DataConfig(source="digits"), None)
    assert (len(images), images.split(1436), images.split(1437)) == (1797, "train", "val")
    assert images.rows("val").tolist() == list(range(1437, 1797))
    assert json.dumps(images.paths[1437]) == '"digits[0]"'


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("learned") / "run"
    return reconv.train("quickstart", overrides=[("length", "1step", "test")], out=out).folder


def test_a_class_with_one_training_image_is_not_called_wrong(learned: Path, tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos")
    for split in ("train", "val"):
        (photos / split / "unique").mkdir()
    for number, name in enumerate(("train/unique/0.png", "val/unique/0.png", "val/unique/1.png")):
        picture(100 + number).save(photos / name)
    result, lines = reviewed(photos, tmp_path / "out", run=str(learned))
    assert "1 label not judged: no other fold has an image of the class" in lines
    wrong = [f for f in result.findings if f.kind == "label" and result.images.paths[f.row] == "train/unique/0.png"]
    assert not wrong and {row.num_wrong is not None for row in result.classes} == {True}


def test_a_network_without_finite_outputs_is_an_error(learned: Path) -> None:
    predictor = Predictor.load(str(learned), backend="eager", device="cpu")
    with torch.no_grad():
        next(predictor.module.parameters()).fill_(float("nan"))
    with pytest.raises(CheckpointError, match="not finite"):
        FeatureNetwork.of_predictor(predictor).outputs(open_digits("val"))


@pytest.mark.parametrize("accepts", [[], ["--accept-above", "0.5"]])
def test_the_printed_command_trains_with_the_corrections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], accepts: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    photos = write_photos(tmp_path / "my photos")
    table = write_predictions(tmp_path / "p.csv", photos, {"train/cat/1.png": "owl"})
    assert run("data", "review", "my photos", "--predictions", str(table), *accepts) == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    if not accepts:
        assert "corrections.csv" in (tmp_path / "data-review" / "review.html").read_text(encoding="utf-8")
        Path("data-review/review.csv").rename("corrections.csv")
    assert command[:5] == ["reconv", "train", "finetune", "--data", "my photos"]
    recipe = load(command[2], parse_settings(command[6::2])).recipe
    opened = open_dataset("folder", photos, "train", recipe.data)
    assert opened.origin.endswith("0 left out, 1 relabeled" if accepts else "0 left out, 0 relabeled")


def test_a_stopped_review_is_continued_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stop.py").write_text(
        "import os, signal, reconv\n"
        "class Stop(reconv.Callback):\n"
        "    def on_step_end(self, run):\n"
        "        if not os.path.exists('stopped'):\n"
        "            open('stopped', 'w').close()\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    settings = ("--set", "length=3step", "--set", "callbacks=[{name: ./stop.py:Stop}]")
    assert run("data", "review", "digits", "--folds", "2", *settings) != 0
    message = capsys.readouterr().err
    assert "fold 1 of 2: stopped" in message and "run the same command to continue" in message
    assert run("data", "review", "digits", "--folds", "2", *settings) == 0
