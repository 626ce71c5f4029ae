"""Malicious files of datasets: pipes and devices in place of any file; COCO, VOC, YOLO and CSV."""

# ruff: noqa: E501
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from malicious_cases import (
    CASES,
    CONTENT,
    DEEP,
    DIGITS,
    JSON,
    SPECIAL,
    Case,
    Context,
    case,
    in_data_check,
    in_dry_run,
    register_files,
    train_arguments,
)

register_files("folder-image", in_data_check("folder", "train/cat/0.jpg"), SPECIAL, CONTENT)
register_files("folder-image-train", in_dry_run("folder", "train/cat/0.jpg"), SPECIAL, CONTENT)
register_files("class-names", in_data_check("folder", "class_names.json"), SPECIAL, CONTENT, JSON)
register_files("class-names-train", in_dry_run("folder", "class_names.json"), SPECIAL, CONTENT, JSON)
register_files("classes-txt", in_data_check("folder", "classes.txt"), SPECIAL, CONTENT)
register_files("coco-json", in_data_check("coco", "annotations/instances_train2017.json"), SPECIAL, CONTENT, JSON)
register_files("coco-val-json", in_data_check("coco", "annotations/instances_val2017.json"), SPECIAL, JSON)
register_files("coco-one-file", in_data_check("folder", "boxes.json"), SPECIAL, JSON)
register_files("voc-xml", in_data_check("voc", "Annotations/i0.xml"), SPECIAL, CONTENT)
register_files("voc-list", in_data_check("voc", "ImageSets/Main/train.txt"), SPECIAL, CONTENT)
register_files("voc-classes", in_data_check("voc", "classes.txt"), SPECIAL, CONTENT)
register_files("yolo-yaml", in_data_check("yolo", "data.yaml"), SPECIAL, CONTENT)
register_files("yolo-label", in_data_check("yolo", "labels/train/i0.txt"), SPECIAL, CONTENT)
register_files("csv", in_data_check("csv", "labels.csv"), SPECIAL, CONTENT)
register_files("csv-train", in_dry_run("csv", "labels.csv"), SPECIAL)
register_files("tar", in_data_check("tar", "train-0000.tar"), SPECIAL, CONTENT)
register_files("tar-classes", in_data_check("tar", "classes.txt"), SPECIAL, CONTENT)
register_files("tar-index", in_data_check("tar", ".reconv-tar-train.index"), SPECIAL, CONTENT)
register_files("tfrecord", in_data_check("tfrecord", "train-00000-of-00001"), SPECIAL, CONTENT)
register_files("box-tfrecord", in_data_check("box_tfrecord", "train-00000-of-00001"), SPECIAL, CONTENT)
register_files("label-map", in_data_check("box_tfrecord", "label_map.pbtxt"), SPECIAL, CONTENT)
register_files("packed", in_data_check("packed", "train-00000-of-00001.packed"), SPECIAL, CONTENT)
register_files("cifar", in_data_check("cifar", "cifar-10-batches-py/data_batch_1"), SPECIAL, CONTENT)
register_files("cifar-meta", in_data_check("cifar", "cifar-10-batches-py/batches.meta"), SPECIAL, CONTENT)
register_files("imagenet-val", in_data_check("imagenet", "val.txt"), SPECIAL, CONTENT)
register_files("imagenet-devkit", in_data_check("imagenet", "ILSVRC2012_devkit_t12.tar.gz"), SPECIAL, CONTENT)
register_files("hf", in_data_check("folder", "dataset_dict.json"), SPECIAL, CONTENT, JSON)


# COCO


def _coco_edit(change: Callable[[dict[str, Any]], object]) -> Case:
    def build(context: Context) -> list[str]:
        root = context.data("coco")
        file = root / "annotations/instances_train2017.json"
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content).replace('"DIGITS"', DIGITS).replace('"HUGE"', "1e999"))
        return ["data", "check", str(root)]

    return build


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], object]:
    def change(content: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        node: Any = content
        for name in parents:
            node = node[int(name)] if name.isdigit() else node[name]
        node[int(last) if last.isdigit() else last] = value

    return change


for _name, _path, _value in (
    ("nan-box", "annotations.0.bbox.0", float("nan")),
    ("inf-box", "annotations.0.bbox.2", float("inf")),
    ("1e999-box", "annotations.0.bbox.2", "HUGE"),
    ("text-box", "annotations.0.bbox.1", "seven"),
    ("null-box", "annotations.0.bbox.1", None),
    ("box-digits", "annotations.0.bbox.1", "DIGITS"),
    ("box-object", "annotations.0.bbox", {"x": 1}),
    ("box-long", "annotations.0.bbox", [1] * 100_000),
    ("nan-area", "annotations.0.area", float("nan")),
    ("text-area", "annotations.0.area", "big"),
    ("id-digits", "images.0.id", "DIGITS"),
    ("id-list", "images.0.id", [1]),
    ("id-huge", "images.0.id", 10**30),
    ("category-huge", "categories.0.id", 10**30),
    ("category-negative", "categories.0.id", -(10**30)),
    ("category-bool", "categories.0.id", True),
    ("category-name-list", "categories.0.name", ["a"]),
    ("category-name-surrogate", "categories.0.name", "\ud800\udfff\ud800"),
    ("category-name-long", "categories.0.name", "n" * 1_000_000),
    ("category-id-huge", "annotations.0.category_id", 10**30),
    ("width-nan", "images.0.width", float("nan")),
    ("width-inf", "images.0.width", float("inf")),
    ("width-digits", "images.0.width", "DIGITS"),
    ("width-text", "images.0.width", "wide"),
    ("height-zero", "images.0.height", 0),
    ("file-nul", "images.0.file_name", "a\0b.jpg"),
    ("file-surrogate", "images.0.file_name", "\ud800.jpg"),
    ("file-long", "images.0.file_name", "x" * 100_000),
    ("file-zero", "images.0.file_name", "/dev/zero"),
    ("file-passwd", "images.0.file_name", "/etc/passwd"),
    ("file-up", "images.0.file_name", "../../../../../../etc/passwd"),
    ("file-empty", "images.0.file_name", ""),
    ("iscrowd-list", "annotations.0.iscrowd", [0]),
    ("iscrowd-nan", "annotations.0.iscrowd", float("nan")),
    ("images-numbers", "images", [1, 2, 3]),
    ("images-empty", "images", []),
    ("annotations-empty", "annotations", []),
    ("categories-empty", "categories", []),
    ("categories-numbers", "categories", [1]),
    ("categories-many", "categories", [{"id": i, "name": f"c{i}"} for i in range(100_000)]),
):
    CASES[f"coco/{_name}"] = _coco_edit(_set(_path, _value))

for _name in (
    "nan-box",
    "file-nul",
    "id-digits",
    "category-huge",
    "file-zero",
    "category-name-surrogate",
    "images-empty",
):

    def _coco_train(context: Context, build: Case = CASES[f"coco/{_name}"]) -> list[str]:
        return train_arguments(Path(build(context)[2]), "ssd300")

    CASES[f"coco-train/{_name}"] = _coco_train


@case("coco/categories-deep")
def _(context: Context) -> list[str]:
    root = context.data("coco")
    (root / "annotations/instances_train2017.json").write_text(
        '{"images": [], "annotations": [], "categories": ' + "[" * DEEP
    )
    return ["data", "check", str(root)]


@case("coco/two-gigabyte-hole")
def _(context: Context) -> list[str]:
    root = context.data("coco")
    file = root / "annotations/instances_train2017.json"
    with file.open("r+b") as opened:
        opened.truncate(3 << 30)
    return ["data", "check", str(root)]


# VOC


_LAUGHS = (
    "<!DOCTYPE a [<!ENTITY e0 'haha'>" + "".join(f"<!ENTITY e{n} '{f'&e{n - 1};' * 10}'>" for n in range(1, 12)) + "]>"
)
XML = {
    "billion-laughs": _LAUGHS + "<annotation><filename>&e11;</filename></annotation>",
    "laughs-in-name": _LAUGHS + "<annotation><object><name>&e11;</name></object></annotation>",
    "quadratic": "<!DOCTYPE a [<!ENTITY a '" + "x" * 200_000 + "'>]><annotation>" + "&a;" * 20_000 + "</annotation>",
    "external": "<!DOCTYPE a [<!ENTITY x SYSTEM 'file:///etc/passwd'>]><annotation><object><name>&x;</name></object></annotation>",
    "external-zero": "<!DOCTYPE a [<!ENTITY x SYSTEM 'file:///dev/zero'>]><annotation>&x;</annotation>",
    "external-dtd": "<!DOCTYPE a SYSTEM 'http://127.0.0.1:9/a.dtd'><annotation/>",
    "deep": "<a>" * DEEP,
    "deep-closed": "<a>" * DEEP + "</a>" * DEEP,
    "many-attributes": "<annotation " + " ".join(f"a{n}='1'" for n in range(100_000)) + "/>",
    "many-objects": "<annotation><size><width>24</width><height>20</height></size>" + "<object/>" * 100_000 + "</annotation>",
    "nan-size": "<annotation><size><width>nan</width><height>inf</height></size></annotation>",
    "digits-size": f"<annotation><size><width>{DIGITS}</width><height>{DIGITS}</height></size></annotation>",
    "nan-box": "<annotation><size><width>24</width><height>20</height></size><object><name>cat</name><bndbox><xmin>nan</xmin><ymin>text</ymin><xmax>inf</xmax><ymax>1e999</ymax></bndbox></object></annotation>",
    "no-root": "",
    "encoding": "<?xml version='1.0' encoding='utf-99'?><annotation/>",
    "encoding-utf7": "<?xml version='1.0' encoding='utf-7'?><annotation/>",
    "encoding-idna": "<?xml version='1.0' encoding='idna'?><annotation/>",
    "name-surrogate": "<annotation><object><name>&#xD800;</name></object></annotation>",
    "name-long": "<annotation><size><width>24</width><height>20</height></size><object><name>" + "n" * 1_000_000 + "</name></object></annotation>",
}  # fmt: skip

for _name, _text in XML.items():

    def _check_xml(context: Context, text: str = _text) -> list[str]:
        root = context.data("voc")
        (root / "Annotations/i0.xml").write_text(text)
        return ["data", "check", str(root)]

    CASES[f"voc/{_name}"] = _check_xml

for _name, _text in {
    "nul": "i\0\n",
    "up": "../../../etc/passwd\n",
    "long": "x" * 100_000 + "\n",
    "zero": "/dev/zero\n",
}.items():

    def _check_list(context: Context, text: str = _text) -> list[str]:
        root = context.data("voc")
        (root / "ImageSets/Main/train.txt").write_text(text)
        return ["data", "check", str(root)]

    CASES[f"voc-stem/{_name}"] = _check_list


# YOLO


ALIASES = "\n".join(
    ["a0: &a0 [x,x,x,x,x,x,x,x,x,x]", *(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10))]
)
YAML = {
    "alias-bomb": ALIASES + "\nnames: *a9\n",
    "alias-bomb-names": ALIASES + "\nnames: [a, b]\n",
    "merge-bomb": "a: &a {x: 1}\n" + "b: {" + ", ".join(["<<: *a"] * 20_000) + "}\nnames: [a, b]\n",
    "deep": "names: " + "[" * 20_000,
    "deep-map": "names: " + "{a: " * 20_000,
    "digits": f"names: {{{DIGITS}: a}}\n",
    "gap": "names: {0: a, 2000000000: b}\n",
    "names-number": "names: 3\n",
    "names-nested": "names: [[a, b], {c: d}]\n",
    "names-nan-key": "names: {.nan: a, .inf: b}\n",
    "names-float-key": "names: {1.5: a}\n",
    "names-negative": "names: {-5: a}\n",
    "names-date": "names: [2020-01-01]\n",
    "python-tag": "names: !!python/object/apply:os.system ['touch hacked']\n",
    "binary-tag": "names: !!binary aGVsbG8=\n",
    "path-root": "path: /\ntrain: .\nval: .\nnames: [a, b]\n",
    "train-root": "train: /\nval: /\nnames: [a, b]\n",
    "train-proc": "train: /proc\nval: /proc\nnames: [a, b]\n",
    "train-zero": "train: /dev/zero\nval: /dev/zero\nnames: [a, b]\n",
    "train-nul": 'train: "a\\0b"\nval: images/val\nnames: [a, b]\n',
    "train-list": "train: [[[1]], {a: b}, null]\nval: images/val\nnames: [a, b]\n",
    "path-number": "path: 7\nnames: [a, b]\n",
    "path-long": "path: " + "x" * 100_000 + "\nnames: [a, b]\n",
    "two-documents": "names: [a]\n---\nnames: [b]\n",
    "list": "- names\n",
    "many-keys": "names: {" + ", ".join(f"{n}: c{n}" for n in range(100_000)) + "}\n",
    "long-line": "names: [" + "a" * 5_000_000 + "]\n",
    "flow-questions": "names: {" + "?" * 20_000,
    "sexagesimal": "names: {1:1:1:1: a}\n",
    "complex-key": "? [a, b]\n: c\nnames: [a, b]\n",
    "timestamp-bad": "date: 2001-99-99\nnames: [a, b]\n",
    "int-bad": "x: 0b\ny: 0x_\nz: 1__2\nnames: [a, b]\n",
    "float-bad": "x: 1:1e5\nnames: [a, b]\n",
}  # fmt: skip

for _name, _text in YAML.items():

    def _check_yaml(context: Context, text: str = _text) -> list[str]:
        root = context.data("yolo")
        (root / "data.yaml").write_text(text)
        return ["data", "check", str(root)]

    CASES[f"yolo/{_name}"] = _check_yaml

LABELS = {
    "digits": f"{DIGITS} 0.5 0.5 0.2 0.2",
    "digits-float": f"0 0.{DIGITS} 0.5 0.2 0.2",
    "nan": "0 nan 0.5 inf 0.2",
    "text": "cat 0.5 0.5 0.2 0.2",
    "1e400": "0 1e400 0.5 -1e400 0.2",
    "negative": "-1 0.5 0.5 0.2 0.2",
    "unicode": "٣ ٠.٥ 0.5 0.2 0.2",
    "one-word": "0",
    "long-polygon": "0 " + "0.5 0.6 " * 500_000,
    "many-lines": "0 0.5 0.5 0.2 0.2\n" * 200_000,
    "bad-lines": "x\n" * 200_000,
    "underscore": "1_0 0.5 0.5 0.2 0.2",
    "nul": "0 0.5\0 0.5 0.2 0.2",
}
for _name, _text in LABELS.items():

    def _check_label(context: Context, text: str = _text) -> list[str]:
        root = context.data("yolo")
        (root / "labels/train/i0.txt").write_text(text)
        return ["data", "check", str(root)]

    CASES[f"yolo-label/{_name}"] = _check_label


# CSV


CSV = {
    "digits-label": "file,label\n" + f"0.jpg,{DIGITS}\n1.jpg,1\n2.jpg,2\n3.jpg,{DIGITS}\n4.jpg,1\n5.jpg,2\n",
    "nul": "file,label\n0.jpg,a\n1.jpg,b\0\n2.jpg,a\n",
    "nul-file": "file,label\n0.jpg,a\n\0.jpg,b\n2.jpg,a\n",
    "nul-first": "file,label\n\0,a\n",
    "nul-header": "file,label\0\n0.jpg,a\n",
    "long-cell": "file,label\n0.jpg," + "a" * 200_000 + "\n1.jpg,b\n",
    "long-header": "file,label," + "x" * 200_000 + "\n0.jpg,a,b\n",
    "many-columns": "file,label," + ",".join(f"c{n}" for n in range(200_000)) + "\n0.jpg,a\n",
    "open-quote": 'file,label\n0.jpg,"a\n1.jpg,b\n' + "x,y\n" * 1000,
    "file-zero": "file,label\n/dev/zero,a\n1.jpg,b\n2.jpg,a\n3.jpg,b\n4.jpg,a\n5.jpg,b\n",
    "file-root": "file,label\n/,a\n1.jpg,b\n2.jpg,a\n3.jpg,b\n4.jpg,a\n5.jpg,b\n",
    "file-up": "file,label\n../../../../etc/passwd,a\n1.jpg,b\n2.jpg,a\n3.jpg,b\n4.jpg,a\n5.jpg,b\n",
    "file-long": "file,label\n" + "x" * 100_000 + ",a\n1.jpg,b\n",
    "file-folder": "file,label\n.,a\n1.jpg,b\n2.jpg,a\n3.jpg,b\n4.jpg,a\n5.jpg,b\n",
    "many-classes": "file,label\n" + "".join(f"0.jpg,c{n}\n" for n in range(50_000)),
    "many-labels": "file,label\n0.jpg," + ";".join(f"c{n}" for n in range(20_000)) + "\n1.jpg,c1;c2\n2.jpg,c1\n3.jpg,c1\n4.jpg,c1\n5.jpg,c2\n",
    "header-only": "file,label\n",
    "carriage": "file,label\r0.jpg,a\r1.jpg,b\r",
    "nan-column": "file,split,cat,dog\n0.jpg,train,1,nan\n1.jpg,val,0,1\n",
    "text-column": "file,split,cat,dog\n0.jpg,train,1,0\n1.jpg,train,0,yes\n2.jpg,val,0,1\n",
    "surrogates": "file,label\n0.jpg,\udcff\n1.jpg,b\n2.jpg,\udcff\n3.jpg,b\n4.jpg,\udcff\n5.jpg,b\n",
    "control": "file,label\n0.jpg,\x1b[31mred\x1b[0m\n1.jpg,b\n2.jpg,b\n3.jpg,b\n4.jpg,b\n5.jpg,b\n",
}  # fmt: skip
for _name, _text in CSV.items():

    def _check_csv(context: Context, text: str = _text) -> list[str]:
        root = context.data("csv")
        (root / "labels.csv").write_bytes(text.encode("utf-8", "surrogateescape"))
        return ["data", "check", str(root)]

    def _train_csv(context: Context, build: Case = _check_csv) -> list[str]:
        return train_arguments(Path(build(context)[2]))

    CASES[f"csv/{_name}"] = _check_csv
    CASES[f"csv-train/{_name}"] = _train_csv
