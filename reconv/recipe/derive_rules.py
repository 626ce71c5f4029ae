"""The rules by which fields are derived from the data, with the text that documents each of them.

They are applied in order, each to the values that are set or were derived before. docs/how-to/finetune.md has them as a
table, which a test compares with this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from reconv.core.errors import RecipeError
from reconv.recipe.derive import DataFacts, Derivation, HeadFacts, SecondMoment, Values, WeightFacts
from reconv.recipe.schema import Recipe
from reconv.recipe.units import BadImages, Duration

SIZES = (64, 96, 128, 160, 192, 224)  # of images, from scratch
TINY_PX = 48  # below: networks for images of 32 pixels, as in CIFAR
SIZE_LIMITS = ((2_000, 128), (20_000, 160))  # below this many images: at most this size
NETWORKS = ((5_000, "resnet18"), (50_000, "resnet34"))  # below this many images
LARGEST_NETWORK = "resnet50"
TINY_NETWORKS = ((20_000, "resnet20_cifar"),)
LARGEST_TINY_NETWORK = "resnet56_cifar"
BACKBONES = ((5_000, "resnet18"),)  # of a detector
LARGEST_BACKBONE = "resnet34"
DETECTOR_PX = 300
IMAGES_PER_BATCH = 16  # a batch is at most this fraction of the images
MAX_GROUP, MIN_GROUP = 32, 8
FREEZE_PERCENT, WARMUP_PERCENT = 10, 5
BACKBONE_LR = 0.2
CURVATURE = 4  # a softmax layer's Hessian has eigenvalues up to a quarter of its input's second moment
EMA_STEPS, EMA_PARTS = 1_000, 20  # EMA from this many steps on, over a twentieth of them
MAX_EVALUATIONS = 30
IMBALANCE, MAX_CLASS_WEIGHT = 3, 10
DECAY_SCRATCH, DECAY_INIT, DECAY_ADAMW = 5e-4, 1e-4, 0.05
BAD_PERCENT = 1
_COLORS = ("channels", "divide_by", "mean", "std", "per_image_standardization", "interpolation")  # of preprocessing
MAX_BOXES = 200


@dataclass(frozen=True, slots=True)
class Amount:
    """Length and learning rate of a task's training."""

    steps: int  # aimed at
    epochs: tuple[int, int]  # fewest and most
    lr: float  # of SGD at `lr_batch`
    lr_adamw: float


@dataclass(frozen=True, slots=True)
class TaskNumbers:
    """The numbers of the rules that differ between classification and detection."""

    batch: tuple[int, int]  # smallest and largest
    lr_batch: int  # the batch that the learning rates are for
    scratch: Amount
    init: Amount


CLASSIFICATION = TaskNumbers((8, 128), 64, Amount(2_000, (30, 200), 0.05, 1e-3), Amount(400, (5, 60), 0.05, 5e-4))
DETECTION = TaskNumbers((4, 32), 32, Amount(6_000, (40, 200), 0.01, 5e-4), Amount(3_000, (20, 150), 0.01, 2e-4))


def _numbers(values: Values) -> TaskNumbers:
    return DETECTION if values.is_detection else CLASSIFICATION


def _amount(values: Values) -> Amount:
    return _numbers(values).scratch if values.weights is None else _numbers(values).init


def _up_to(number: int, limits: tuple[tuple[int, str], ...], largest: str) -> tuple[str, str]:
    """The name for a number of images, and the range it is for."""
    for limit, name in limits:
        if number < limit:
            return name, f"{number:,} images, fewer than {limit:,}"
    return largest, f"{number:,} images, {limits[-1][0]:,} or more"


def _is_tiny(values: Values) -> bool:
    return values.data.short_side < TINY_PX


def _network(values: Values) -> Iterator[Derivation]:
    weights, data = values.weights, values.data
    if values.is_detection:
        return
    if weights is not None:
        if weights.model is not None:
            yield Derivation("model.name", weights.model, f"the model of {weights.name}")
    elif _is_tiny(values):
        name, why = _up_to(data.num_train, TINY_NETWORKS, LARGEST_TINY_NETWORK)
        yield Derivation("model.name", name, f"sides of {data.short_side} px, below {TINY_PX}; {why}")
    else:
        yield Derivation("model.name", *_up_to(data.num_train, NETWORKS, LARGEST_NETWORK))


def _options(values: Values) -> Iterator[Derivation]:
    weights, name = values.weights, str(values["model.name"])
    if weights is not None and weights.model == name:
        for option, value in weights.options.items():
            yield Derivation(f"model.options.{option}", value, f"as in {weights.name}")
    elif values.is_detection:
        if weights is not None and weights.model is not None:
            yield Derivation("model.options.backbone", weights.model, f"the model of {weights.name}")
        elif weights is None:
            backbone = _up_to(values.data.num_train, BACKBONES, LARGEST_BACKBONE)
            yield Derivation("model.options.backbone", *backbone)
        yield Derivation("model.options.extra_norms", True, "the layers after the backbone start from random weights")


def _images(values: Values) -> Iterator[Derivation]:
    weights, preprocess = values.weights, {} if values.weights is None else dict(values.weights.preprocess)
    if values.is_detection and weights is not None and not weights.anchors:  # a backbone, trained on other crops
        preprocess = {key: preprocess[key] for key in _COLORS if key in preprocess}
    if values.is_fixed("data.preprocess.size"):
        preprocess.pop("resize", None)
    for key, value in preprocess.items():
        name, plain = f"data.preprocess.{key}", tuple(value) if isinstance(value, list) else value
        if key == "size" or plain != values[name]:
            yield Derivation(name, value, f"as {weights.name if weights else ''} was trained")
    if "size" not in preprocess:
        yield Derivation("data.preprocess.size", *_image_size(values))
    if "resize" not in preprocess and not values.is_detection:
        size = int(values["data.preprocess.size"])
        why = f"a center crop of {size} px from a shorter side of {size} x 256/224 px"
        yield Derivation("data.preprocess.resize", "auto-ratio", why)


def _image_size(values: Values) -> tuple[int, str]:
    """Height and width of the images in pixels, and why."""
    name, side, num_train = str(values["model.name"]), values.data.short_side, values.data.num_train
    if values.is_detection:
        return DETECTOR_PX, f"SSD{DETECTOR_PX}, as published"
    if name.endswith("_cifar"):
        return 32, f"{name} is made for 32 px"
    if values.weights is not None:
        return 224, "the usual size of weights trained on ImageNet"
    limit = next((size for number, size in SIZE_LIMITS if num_train < number), SIZES[-1])
    size = max((size for size in SIZES if size <= min(side, limit)), default=SIZES[0])
    return size, f"sides of {side} px (median); at most {limit} px with {num_train:,} images"


def _batch_size(values: Values) -> Iterator[Derivation]:
    num_train, (smallest, largest) = values.data.num_train, _numbers(values).batch
    wanted = num_train // IMAGES_PER_BATCH
    size = min(largest, max(smallest, _power_of_two(wanted)), num_train)
    why = f"{num_train:,} images / {IMAGES_PER_BATCH} = {wanted:,}, down to a power of two from {smallest} to {largest}"
    yield Derivation("batch.size", size, why)


def _power_of_two(number: int) -> int:
    """The largest power of two up to a number; 1 for 0."""
    return 1 << max(0, number.bit_length() - 1)


def _group(values: Values) -> Iterator[Derivation]:
    size = int(values["batch.size"])
    if size <= MAX_GROUP:
        yield Derivation("batch.group", "all", f"the batch of {size} has at most {MAX_GROUP} samples")
        return
    group = max(divisor for divisor in range(1, MAX_GROUP + 1) if size % divisor == 0)
    if group < MIN_GROUP:
        yield Derivation(
            "batch.group", MAX_GROUP, f"the batch of {size} has no divisor from {MIN_GROUP} to {MAX_GROUP}"
        )
    else:
        yield Derivation("batch.group", group, f"{size} = {size // group} x {group}, in parts of at most {MAX_GROUP}")


def _epochs(number: float) -> str:
    return "epoch" if number == 1 else "epochs"


def _length(values: Values) -> Iterator[Derivation]:
    amount, steps = _amount(values), values.steps_per_epoch
    fewest, most = amount.epochs
    wanted = math.ceil(amount.steps / steps)
    epochs = min(most, max(fewest, wanted))
    start = "from scratch" if values.weights is None else "from weights"
    why = (
        f"{start}: {amount.steps:,} steps / {steps:,} per epoch = {wanted:,} {_epochs(wanted)}, from {fewest} to {most}"
    )
    yield Derivation("length", Duration(epochs, "ep"), why)


def _freeze(values: Values) -> Iterator[Derivation]:
    if values.weights is None or values["model.freeze_backbone"] or values["model.trainable"]:
        return
    total = values.total_steps
    steps = math.floor(total * FREEZE_PERCENT / 100 + 0.5)
    if 0 < steps < total:
        why = f"the head first, for {FREEZE_PERCENT}% of {total:,} steps = {steps:,}; then all parameters"
        yield Derivation("model.freeze_until", Duration(FREEZE_PERCENT, "%"), why)


def _lr(values: Values) -> Iterator[Derivation]:
    optimizer, known = str(values["optimizer.name"]), ("sgd", "adamw")
    if values.is_fixed("schedule.lr"):
        return
    if optimizer not in known:
        raise RecipeError(
            f"the learning rate of {optimizer} is not derived from the data",
            why=f"there are rules for {' and '.join(known)} only",
            hint="give it: --lr X",
        )
    lr, why = _plain_lr(values)
    is_pretrained = values.weights is not None and not values.is_detection
    head = values.measure_head() if optimizer == "sgd" and is_pretrained else None
    if head is not None:
        limit, arithmetic = _head_limit(values, head)
        below, above = f"{why}, below {limit:g} = {arithmetic}", f"{arithmetic}; {why} = {lr:g} is above that"
        lr, why = (limit, above) if limit < lr else (lr, below)
    yield Derivation("schedule.lr", lr, why)


def _plain_lr(values: Values) -> tuple[float, str]:
    """The rate by the batch size alone, and its arithmetic."""
    numbers, amount, batch = _numbers(values), _amount(values), int(values["batch.size"])
    rate = amount.lr_adamw if values["optimizer.name"] == "adamw" else amount.lr
    lr = _two_digits(rate * math.sqrt(batch / numbers.lr_batch))
    return lr, f"{rate:g} x sqrt({batch} / {numbers.lr_batch})"


def _two_digits(number: float) -> float:
    """A number without the digits in which machines differ."""
    return float(f"{number:.2g}")


def _head_limit(values: Values, head: HeadFacts) -> tuple[float, str]:
    """The largest rate at which SGD trains a softmax layer on these features without diverging, and its arithmetic.

    On a parabola of curvature h, SGD with momentum m converges below the rate 2 (1 + m) / h, and the noise of batches
    of B samples lets it diverge from about 2 B (1 - m) / trace on. The inverses of the two are added.
    """
    momentum, batch = float(values["optimizer.momentum"]), int(values["batch.size"])
    ahead = 1 + 2 * momentum if values["optimizer.nesterov"] else 1  # how much of the bound Nesterov's step takes away
    steepness, noise = 2 * CURVATURE * (1 + momentum) / ahead, 2 * CURVATURE * batch * (1 - momentum)

    def limit(moment: SecondMoment) -> float:
        return 1 / (moment.eigenvalue / steepness + moment.trace / noise)

    moment, statistics = min(
        ((head.running, "running statistics"), (head.batch, "statistics of the batch")), key=lambda pair: limit(pair[0])
    )
    why = (
        f"1 / ({_round(moment.eigenvalue)} / {steepness:.3g} + {_round(moment.trace)} / {noise:.3g}), from the largest "
        f"eigenvalue and the trace of the second moment of {head.layer}'s input ({head.num_images} images of "
        f"{head.size} px, {statistics}), momentum {momentum:g} and the batch of {batch}"
    )
    return _two_digits(limit(moment)), why


def _round(number: float) -> str:
    """A measured number to three digits."""
    return f"{float(f'{number:.3g}'):,g}"


def _backbone_lr(values: Values) -> Iterator[Derivation]:
    # Also where the head's rate is limited: a backbone that kept its own rate then lost 15 points in an epoch after it
    # was unfrozen (MobileNetV2 at 96 px, batch 16).
    has_rates_by_layer = values["optimizer.layer_decay"] != 1
    if values.weights is not None and not values["model.freeze_backbone"] and not has_rates_by_layer:
        yield Derivation("optimizer.backbone_lr_scale", BACKBONE_LR, "the backbone is trained already")


def _warmup(values: Values) -> Iterator[Derivation]:
    total = values.total_steps
    steps = math.floor(total * WARMUP_PERCENT / 100 + 0.5)
    yield Derivation(
        "schedule.warmup", Duration(WARMUP_PERCENT, "%"), f"{WARMUP_PERCENT}% of {total:,} = {steps:,} steps"
    )


def _weight_decay(values: Values) -> Iterator[Derivation]:
    if values["optimizer.name"] == "adamw":
        yield Derivation("optimizer.weight_decay", DECAY_ADAMW, "the usual one of adamw")
    elif values.weights is None:
        yield Derivation("optimizer.weight_decay", DECAY_SCRATCH, "from scratch")
    else:
        yield Derivation("optimizer.weight_decay", DECAY_INIT, "from weights")


def _ema(values: Values) -> Iterator[Derivation]:
    total = values.total_steps
    if total >= EMA_STEPS:
        decay = round(1 - EMA_PARTS / total, 5)
        yield Derivation("ema.decay", decay, f"1 - {EMA_PARTS} / {total:,} steps")


def _evaluations(field: str) -> Callable[[Values], Iterator[Derivation]]:
    def rule(values: Values) -> Iterator[Derivation]:
        length: Duration = values["length"]
        if length.unit == "ep" and length.value >= 1:
            every = math.ceil(length.value / MAX_EVALUATIONS)
            why = f"{length.value:g} {_epochs(length.value)}, at most {MAX_EVALUATIONS} times"
            yield Derivation(field, Duration(every, "ep"), why)
        else:
            yield Derivation(field, Duration(20, "%"), "five times in the run")

    return rule


def _class_weights(values: Values) -> Iterator[Derivation]:
    counts = [count for count in values.data.class_counts if count]
    # Of several labels per image, rare ones are the rule: weights would raise all scores. Other losses have no weights
    # of samples, and a balanced sampler makes up for rare classes already.
    is_plain = values["loss.name"] in ("auto", "cross_entropy") and values["distill.teacher"] is None
    is_weighted = values["task"] == "classification" and is_plain and values["data.sampler"] != "balanced"
    if not is_weighted or not counts or max(counts) <= IMBALANCE * min(counts):
        return
    ratio = (
        f"largest class {max(counts):,} / smallest {min(counts):,} = {max(counts) / min(counts):.1f}, above {IMBALANCE}"
    )
    mean = sum(counts) / len(counts)
    if mean / min(counts) <= MAX_CLASS_WEIGHT:
        yield Derivation("loss.class_weights", "balanced", ratio)
        return
    weights = [round(min(MAX_CLASS_WEIGHT, mean / count), 4) if count else 1.0 for count in values.data.class_counts]
    yield Derivation("loss.class_weights", weights, f"{ratio}; balanced, at most {MAX_CLASS_WEIGHT}")


def _bad_images(values: Values) -> Iterator[Derivation]:
    num_bad = max(1, values.data.num_train * BAD_PERCENT // 100)
    why = f"{BAD_PERCENT}% of {values.data.num_train:,} images, at least one; each is listed"
    yield Derivation("data.bad_images", BadImages(num_bad), why)


def _anchors(values: Values) -> Iterator[Derivation]:
    proposed, weights = values.data.anchors, values.weights
    if not values.is_detection:
        return
    if weights is not None and weights.anchors:
        for key, value in weights.anchors.items():
            yield Derivation(f"detection.anchors.{key}", value, f"as in {weights.name}")
    elif proposed is not None and proposed.mean_iou > proposed.default_iou:
        why = (
            f"k-means over {proposed.num_boxes:,} boxes: mean IoU with the best anchor {proposed.mean_iou:.3f}, "
            f"{proposed.default_iou:.3f} with SSD's"
        )
        yield Derivation("detection.anchors.scales", proposed.scales, why)
        yield Derivation("detection.anchors.aspect_ratios", proposed.aspect_ratios, why)


def _max_boxes(values: Values) -> Iterator[Derivation]:
    if values.is_detection and values.data.max_boxes:
        number = min(MAX_BOXES, 8 * math.ceil(values.data.max_boxes / 8))
        why = f"at most {values.data.max_boxes} boxes in an image, up to a multiple of 8, at most {MAX_BOXES}"
        yield Derivation("detection.max_gt_boxes", number, why)


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule that derives a field, or the fields of a section."""

    name: str
    apply: Callable[[Values], Iterator[Derivation]]
    text: str  # for the documentation: classification, or both tasks
    detection: str = ""  # where detection differs


def _amounts(numbers: TaskNumbers) -> str:
    return "; ".join(
        f"{start} {amount.steps:,} steps in {amount.epochs[0]} to {amount.epochs[1]} epochs"
        for start, amount in (("from weights", numbers.init), ("from scratch", numbers.scratch))
    )


def _rates(numbers: TaskNumbers) -> str:
    rates = [f"{a.lr:g} {where}" for where, a in (("from weights", numbers.init), ("from scratch", numbers.scratch))]
    adamw = f"{numbers.init.lr_adamw:g} and {numbers.scratch.lr_adamw:g}"
    return f"{', '.join(rates)} (adamw: {adamw}), times sqrt(batch / {numbers.lr_batch})"


_HEAD_RATE = (
    "from weights with SGD at most the rate at which the last layer would diverge, from its inputs for some training "
    "images: 1 / (e / (8 (1 + m)) + t / (8 B (1 - m))) with the largest eigenvalue e and the trace t of their second "
    "moment, momentum m and batch B"
)


def _by_images(limits: tuple[tuple[int, str], ...], largest: str) -> str:
    return ", ".join([*(f"{name} below {limit:,} images" for limit, name in limits), f"else {largest}"])


RULES: tuple[Rule, ...] = (
    Rule(
        "model.name",
        _network,
        f"the model of the weights; from scratch {_by_images(NETWORKS, LARGEST_NETWORK)}; "
        f"for images with sides below {TINY_PX} px {_by_images(TINY_NETWORKS, LARGEST_TINY_NETWORK)}",
        "SSD",
    ),
    Rule(
        "model.options",
        _options,
        "the options of the weights' run",
        f"`backbone`: the model of the weights; from scratch {_by_images(BACKBONES, LARGEST_BACKBONE)}; "
        "`extra_norms: true`",
    ),
    Rule(
        "data.preprocess",
        _images,
        "as the weights were trained: a run's or timm's settings, else 224 px; from scratch the largest of "
        f"{', '.join(map(str, SIZES))} px up to the median of the images' shorter sides, "
        f"{', '.join(f'at most {size} below {number:,} images' for number, size in SIZE_LIMITS)}; "
        "models for CIFAR 32 px",
        f"{DETECTOR_PX} px",
    ),
    Rule(
        "batch.size",
        _batch_size,
        f"images / {IMAGES_PER_BATCH}, down to a power of two from {CLASSIFICATION.batch[0]} to "
        f"{CLASSIFICATION.batch[1]}",
        f"from {DETECTION.batch[0]} to {DETECTION.batch[1]}",
    ),
    Rule(
        "batch.group",
        _group,
        f"the batch up to {MAX_GROUP} samples, else its largest divisor up to {MAX_GROUP} ({MAX_GROUP} if that is "
        f"below {MIN_GROUP})",
    ),
    Rule("length", _length, _amounts(CLASSIFICATION), _amounts(DETECTION)),
    Rule("model.freeze_until", _freeze, f"{FREEZE_PERCENT}% of the run if there are initial weights"),
    Rule("schedule.lr", _lr, f"{_rates(CLASSIFICATION)}; {_HEAD_RATE}", _rates(DETECTION)),
    Rule(
        "optimizer.backbone_lr_scale",
        _backbone_lr,
        f"{BACKBONE_LR:g} if there are initial weights, unless `layer_decay` is set",
    ),
    Rule("schedule.warmup", _warmup, f"{WARMUP_PERCENT}% of the run"),
    Rule(
        "optimizer.weight_decay",
        _weight_decay,
        f"{DECAY_INIT:g} from weights, {DECAY_SCRATCH:g} from scratch (adamw: {DECAY_ADAMW:g})",
    ),
    Rule("ema.decay", _ema, f"1 - {EMA_PARTS} / steps from {EMA_STEPS:,} steps on; shorter runs have no EMA"),
    Rule(
        "evaluate.every",
        _evaluations("evaluate.every"),
        f"each epoch, or so many epochs that there are at most {MAX_EVALUATIONS} evaluations",
    ),
    Rule("save.every", _evaluations("save.every"), "like `evaluate.every`"),
    Rule(
        "loss.class_weights",
        _class_weights,
        f"`balanced` if the largest class has more than {IMBALANCE} times the images of the smallest; no weight above "
        f"{MAX_CLASS_WEIGHT}; none with `data.sampler: balanced`, `task: multilabel`, a teacher, `bce` or your own "
        "loss",
        "none",
    ),
    Rule("data.bad_images", _bad_images, f"`skip up to` {BAD_PERCENT}% of the images, at least one"),
    Rule(
        "detection.anchors",
        _anchors,
        "none",
        "k-means over the sizes of the boxes, if it fits them better than SSD's own; those of the run if the weights "
        "are a detector's",
    ),
    Rule(
        "detection.max_gt_boxes",
        _max_boxes,
        "none",
        f"the most boxes of an image, up to a multiple of 8, at most {MAX_BOXES}",
    ),
)


def derive(
    recipe: Recipe,
    fixed: Collection[str],
    data: DataFacts,
    weights: WeightFacts | None,
    measure_head: Callable[[Sequence[Derivation]], HeadFacts | None] = lambda derived: None,
) -> tuple[Derivation, ...]:
    """The values of the fields in `recipe.derive`, apart from the `fixed` ones, which are set.

    `weights` are the initial ones; None: the network starts from random weights. `measure_head` gets what is derived so
    far and measures the features of the pretrained network, where a rule asks for them.
    """
    derived: list[Derivation] = []
    values = Values(recipe, fixed, data, weights, lambda: measure_head(derived))
    for rule in RULES:
        for derivation in rule.apply(values) if rule.name in recipe.derive else ():
            if not values.is_fixed(derivation.name):
                values.add(derivation)
                derived.append(derivation)
    return tuple(derived)
