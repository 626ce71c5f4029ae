"""Limits of what is read from files of others. docs/how-to/data.md lists them; a test compares the two.

They are far above what real data needs, and keep a small malicious file from exhausting memory or time.
"""

from __future__ import annotations

from typing import Final

MIB: Final = 1 << 20
GIB: Final = 1 << 30

# Datasets
IMAGE_BYTES: Final = 512 * MIB  # an encoded image, a record, or any other file that is read whole
IMAGE_PIXELS: Final = 89_478_485  # a quarter of a GiB as RGB; where Pillow starts to warn of decompression bombs
JPEG_SCANS: Final = 250  # encoders write about 10; each takes the time of a whole image, and a few bytes
PNM_COMMENTS: Final = 1000  # of a plain file, which Pillow reads in Python
COCO_BYTES: Final = 4 * GIB
TABLE_BYTES: Final = 1 * GIB  # CSV, and lists of file names
CELL_BYTES: Final = 131_072  # of a CSV file: the limit of Python's csv
XML_BYTES: Final = 16 * MIB
LABEL_FILE_BYTES: Final = 16 * MIB  # YOLO's text file of one image
DATA_YAML_BYTES: Final = 1 * MIB
NAMES_BYTES: Final = 16 * MIB  # files of class names and label maps
DEVKIT_BYTES: Final = 256 * MIB  # ImageNet's development kit, unpacked
CLASSES: Final = 1 << 20
CLASS_NAME_CHARS: Final = 1000
REVIEW_LIST_BYTES: Final = 256 * MIB  # of data.exclude and data.relabel
SHARDS: Final = 1_000_000
WALK_ENTRIES: Final = 100_000  # files and folders below a folder of images; beyond that it must hold images
WALK_IMAGES_FRACTION: Final = 0.1  # of them

# Recipes and runs
RECIPE_BYTES: Final = 1 * MIB
RECIPE_KEYS: Final = 1000
NESTING: Final = 64  # of a recipe, data.yaml, and JSON files of runs
RUN_JSON_BYTES: Final = 1 * MIB  # run.json, best.json
SUMMARY_BYTES: Final = 16 * MIB
MANIFEST_BYTES: Final = 16 * MIB
STATE_BYTES: Final = 256 * MIB
ANALYSIS_BYTES: Final = 256 * MIB  # classification.json, detection.json
TF_INDEX_BYTES: Final = 64 * MIB  # the index of a TensorFlow checkpoint
EVALUATIONS_BYTES: Final = 64 * MIB  # evaluations.csv
