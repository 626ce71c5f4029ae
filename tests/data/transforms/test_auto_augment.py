"""AutoAugment and RandAugment: each operation is Pillow's, each policy the published one."""

from __future__ import annotations

import numpy as np
import pytest
from data_examples import noise
from loading_examples import each_row
from PIL import Image, ImageChops, ImageEnhance, ImageFilter, ImageOps

from reconv.data.transforms.auto_augment import (
    OP_UNIFORM,
    POLICIES,
    SUB_POLICY,
    Policy,
    rand_operations,
)
from reconv.data.transforms.image_ops import OPERATIONS, Operation, apply_operation
from reconv.data.transforms.random_policies import (
    OP_APPLIED,
    OP_INDEX,
    OP_LEVEL,
    OP_NEGATED,
    timm_operation,
    trivial_operation,
)
from reconv.recipe.parts.data import AugmentConfig, RandAugmentConfig

GRAY = 128


def colors(width: int = 40, height: int = 32) -> Image.Image:
    """An image with smooth and rough parts, and not the full range of brightness."""
    return Image.fromarray(noise(8, 8, 3, 4) // 2 + 40).resize((width, height), Image.Resampling.BICUBIC)


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


def test_value_operations_are_those_of_pillow() -> None:
    image = colors()
    expected = {
        "identity": (0, image),
        "brightness": (0.5, ImageEnhance.Brightness(image).enhance(1.5)),
        "color": (-0.9, ImageEnhance.Color(image).enhance(1 - 0.9)),
        "contrast": (0.3, ImageEnhance.Contrast(image).enhance(1.3)),
        "sharpness": (0.9, ImageEnhance.Sharpness(image).enhance(1.9)),
        "posterize": (3, ImageOps.posterize(image, 3)),
        "solarize": (100, ImageOps.solarize(image, 100)),
        "autocontrast": (0, ImageOps.autocontrast(image)),
        "equalize": (0, ImageOps.equalize(image)),
        "invert": (0, ImageOps.invert(image)),
        "grayscale": (0, image.convert("L").convert("RGB")),
        "blur": (1.5, image.filter(ImageFilter.GaussianBlur(1.5))),
    }
    for name, (strength, wanted) in expected.items():
        result = OPERATIONS[name](image, strength, GRAY)
        assert np.array_equal(pixels(result), pixels(wanted)), name
        assert (name == "identity") == np.array_equal(pixels(result), pixels(image)), name
    translations = {f"translate-{axis}{kind}" for axis in "xy" for kind in ("", "-rel", "-pixels")}
    geometric = {"shear-x", "shear-y", "rotate", "solarize-add"}
    assert expected.keys() | geometric | translations == OPERATIONS.keys()


def test_translations_move_pixels_and_fill_with_gray() -> None:
    image = colors(40, 32)
    before = pixels(image)
    across = pixels(OPERATIONS["translate-x"](image, 0.25, 7))
    assert np.array_equal(across[:, :30], before[:, 10:])
    assert (across[:, 30:] == 7).all()
    down = pixels(OPERATIONS["translate-y"](image, -0.25, 7))
    assert np.array_equal(down[8:], before[:-8])
    assert (down[:8] == 7).all()
    assert np.array_equal(pixels(OPERATIONS["translate-y-pixels"](image, -8, 7)), down)
    assert np.array_equal(pixels(OPERATIONS["translate-y-rel"](image, -0.25, 7)), down)
    assert np.array_equal(pixels(OPERATIONS["translate-x-pixels"](image, 10, 7)), across)
    assert np.array_equal(pixels(OPERATIONS["translate-x-rel"](image, 0.25, 7)), across)
    halfway = pixels(OPERATIONS["translate-x-pixels"](image, 0.5, (9, 8, 7), Image.Resampling.BILINEAR))
    assert np.abs(halfway[:, 1:-1] - (before[:, 1:-1] + before[:, 2:]) / 2).max() <= 1
    assert pixels(OPERATIONS["translate-x-pixels"](image, 20, (9, 8, 7)))[0, -1].tolist() == [9, 8, 7]


def test_shears_move_each_row_or_column_by_its_distance() -> None:
    image = colors(40, 32)
    before = pixels(image)
    sheared = pixels(OPERATIONS["shear-x"](image, 0.25, GRAY))
    for row in (0, 10, 31):
        shift = int(0.5 + 0.25 * (row + 0.5))
        assert np.array_equal(sheared[row, : 40 - shift], before[row, shift:])
    turned = pixels(OPERATIONS["shear-y"](image.transpose(Image.Transpose.TRANSPOSE), 0.25, GRAY))
    assert np.array_equal(turned.transpose(1, 0, 2), sheared)


def test_rotation_is_about_the_center_and_fills_corners() -> None:
    image = colors(32, 32)
    assert np.array_equal(
        pixels(OPERATIONS["rotate"](image, 90, GRAY)), pixels(image.transpose(Image.Transpose.ROTATE_90))
    )
    assert pixels(OPERATIONS["rotate"](image, 45, GRAY))[0, 0].tolist() == [GRAY] * 3
    assert pixels(OPERATIONS["rotate"](image.convert("L"), 45, GRAY))[0, 0] == GRAY


def test_solarize_add_changes_dark_pixels_only() -> None:
    ramp = Image.fromarray(np.arange(256, dtype=np.uint8)[None].repeat(2, 0))
    result = pixels(OPERATIONS["solarize-add"](ramp, 110, GRAY))[0]
    assert np.array_equal(result[:128], np.arange(128) + 110)
    assert np.array_equal(result[128:], np.arange(128, 256))


def test_a_signed_strength_can_be_negated() -> None:
    image, rotate = colors(), Operation("rotate", 20.0, signed=True)
    for negated, degrees in ((False, 20), (True, -20)):
        wanted = image.rotate(degrees, fillcolor=(GRAY,) * 3)
        assert np.array_equal(pixels(apply_operation(image, rotate, negated, GRAY)), pixels(wanted))
    unsigned = (apply_operation(image, Operation("posterize", 4), negated, GRAY) for negated in (False, True))
    assert ImageChops.difference(*unsigned).getbbox() is None


def test_the_published_tables_have_25_pairs_at_the_published_strengths() -> None:
    paper, v0 = POLICIES["autoaugment"], POLICIES["autoaugment-v0"]
    assert len(paper) == len(v0) == 25
    assert all(0 <= operation.probability <= 1 for pair in (*paper, *v0) for operation in pair)
    assert paper[0] == (Operation("posterize", 4, False, 0.4), Operation("rotate", 30.0, True, 0.6))
    assert paper[3] == (Operation("posterize", 5, False, 0.6), Operation("posterize", 5, False, 0.6))
    assert paper[10] == (Operation("rotate", pytest.approx(80 / 3), True, 0.8), Operation("color", 0.0, True, 0.4))
    assert paper[8][1] == Operation("solarize", pytest.approx(256 / 9), False, 0.6)
    assert paper[18][0] == Operation("shear-x", pytest.approx(0.3 * 5 / 9), True, 0.6)
    assert v0[0][1] == Operation("shear-y", pytest.approx(0.12), True, 0.8)
    assert v0[5][0] == Operation("color", pytest.approx(-0.9), False, 0.2)
    assert v0[15] == (Operation("rotate", pytest.approx(21.0), True), Operation("translate-y-pixels", 225.0, True, 0.8))
    assert v0[22] == (Operation("posterize", 1, False, 0.8), Operation("solarize", 256.0, False, 0.6))
    assert v0[21][1] == Operation("solarize-add", 77, False, 0.6)


def test_randaugments_strengths_grow_with_the_magnitude() -> None:
    assert len(rand_operations(9)) == 14
    least, most = ({o.name: o.strength for o in rand_operations(m)} for m in (0, 30))
    assert (least["rotate"], most["rotate"]) == (0, 30)
    assert (least["posterize"], most["posterize"]) == (8, 4)
    assert (least["solarize"], most["solarize"]) == (256, 0)
    assert (least["brightness"], most["brightness"]) == (0, 0.9)
    assert most["translate-x"] == pytest.approx(150 / 331)
    image = colors()
    unchanged = [
        o.name
        for o in rand_operations(0)
        if np.array_equal(pixels(apply_operation(image, o, False, GRAY)), pixels(image)) and o.name != "identity"
    ]
    assert set(unchanged) == least.keys() - {"identity", "autocontrast", "equalize"}


def test_timms_randaugment_has_its_operations_and_strengths() -> None:
    found = {o.name: (o.strength, o.signed) for o in (timm_operation(index, 0.7) for index in range(15))}
    assert found == {
        **dict.fromkeys(("autocontrast", "equalize", "invert"), (0.0, False)),
        "rotate": (pytest.approx(21), True),
        "posterize": (2, False),  # 4 - int(2.8) bits are kept
        "solarize": (256 - 179, False),
        "solarize-add": (77, False),
        **{name: (pytest.approx(0.63), True) for name in ("color", "contrast", "brightness", "sharpness")},
        **{name: (pytest.approx(0.21), True) for name in ("shear-x", "shear-y")},
        **{name: (pytest.approx(0.315), True) for name in ("translate-x-rel", "translate-y-rel")},
    }


def test_timms_magnitudes_are_normal_and_half_of_the_operations_are_applied() -> None:
    rand = RandAugmentConfig(implementation="timm", magnitude=7, magnitude_std=0.5)
    augment = AugmentConfig(auto_augment="randaugment", randaugment=rand)
    params = Policy(augment).sample(3, np.arange(20_000, dtype=np.int64))
    levels = params[OP_LEVEL] * 10
    assert levels.mean() == pytest.approx(7, abs=0.02) and levels.std() == pytest.approx(0.5, abs=0.01)
    assert (np.abs(levels - 7) < 0.5).mean() == pytest.approx(0.683, abs=0.01)
    assert abs(np.corrcoef(levels[:, 0], levels[:, 1])[0, 1]) < 0.03
    assert params[OP_APPLIED].mean() == pytest.approx(0.5, abs=0.01)
    assert params[OP_INDEX].min() == 0 and params[OP_INDEX].max() == 14
    wild = rand.model_copy(update={"magnitude_std": 50.0})
    levels = Policy(augment.model_copy(update={"randaugment": wild})).sample(3, np.arange(99))[OP_LEVEL]
    assert (levels.min(), levels.max()) == (0, 1)


def test_trivial_augment_has_the_strengths_of_torchvision() -> None:
    for bin_number in (0, 10, 30):
        found = {o.name: o.strength for o in (trivial_operation(i, bin_number / 30) for i in range(14))}
        assert len(found) == 14
        assert found["shear-x"] == found["brightness"] == pytest.approx(np.linspace(0, 0.99, 31)[bin_number])
        assert found["translate-y-pixels"] == int(np.linspace(0, 32, 31)[bin_number])
        assert found["rotate"] == pytest.approx(np.linspace(0, 135, 31)[bin_number])
        assert found["posterize"] == 8 - round(bin_number / (30 / 6))
        assert found["solarize"] == pytest.approx(np.linspace(255, 0, 31)[bin_number])
    params = Policy(AugmentConfig(auto_augment="ta_wide")).sample(0, np.arange(5000, dtype=np.int64))
    assert len(np.unique(params[OP_LEVEL])) == 31


def test_three_augment_is_grayscale_solarize_or_blur() -> None:
    image, augment = colors(), AugmentConfig(auto_augment="3-augment")
    wanted = [
        image.convert("L").convert("RGB"),
        ImageOps.solarize(image, 128),
        image.filter(ImageFilter.GaussianBlur(0.1 + 1.9 * 0.25)),
    ]
    for index, expected in enumerate(wanted):
        params = {OP_INDEX: np.array([index]), OP_NEGATED: np.array([False]), OP_LEVEL: np.array([0.25])}
        assert np.array_equal(pixels(Policy(augment).apply(image, params)), pixels(expected))
    drawn = Policy(augment).sample(0, np.arange(3000, dtype=np.int64))[OP_INDEX]
    assert np.bincount(drawn[:, 0]).min() > 900


def test_only_drawn_strengths_are_resampled_as_the_recipe_says() -> None:
    image, rotate = colors(), np.array([3])
    augment = AugmentConfig(
        auto_augment="randaugment", fill=(124, 116, 104), randaugment=RandAugmentConfig(implementation="timm")
    )
    params = {OP_INDEX: rotate, OP_NEGATED: np.array([True]), OP_LEVEL: np.array([0.5]), OP_APPLIED: np.array([True])}
    wanted = image.rotate(-15, Image.Resampling.BICUBIC, fillcolor=(124, 116, 104))
    assert np.array_equal(pixels(Policy(augment, "bicubic").apply(image, params)), pixels(wanted))
    params[OP_APPLIED] = np.array([False])
    assert Policy(augment, "bicubic").apply(image, params) is image


def test_autoaugment_applies_the_chosen_pair() -> None:
    image = colors()
    augment = AugmentConfig(auto_augment="autoaugment", crop="none")

    def augmented(sub_policy: int, uniform: tuple[float, float], negated: tuple[bool, bool]) -> np.ndarray:
        params = {SUB_POLICY: np.array(sub_policy), OP_UNIFORM: np.array(uniform), OP_NEGATED: np.array(negated)}
        return pixels(Policy(augment).apply(image, params))

    # Pair 2: equalize with probability 0.8, equalize with probability 0.6.
    assert np.array_equal(augmented(2, (0.79, 0.61), (True, True)), pixels(ImageOps.equalize(image)))
    assert np.array_equal(augmented(2, (0.81, 0.61), (True, True)), pixels(image))
    wanted = ImageOps.posterize(image, 4).rotate(30, fillcolor=(GRAY,) * 3)
    assert np.array_equal(augmented(0, (0.39, 0.59), (True, False)), pixels(wanted))


def test_randaugment_applies_n_operations_in_order() -> None:
    image = colors()
    augment = AugmentConfig(
        auto_augment="randaugment", randaugment=RandAugmentConfig(num_ops=2, magnitude=30), crop="none"
    )
    posterize, rotate = 10, 5
    params = {OP_INDEX: np.array([posterize, rotate]), OP_NEGATED: np.array([True, False])}
    wanted = ImageOps.posterize(image, 4).rotate(30, fillcolor=(GRAY,) * 3)
    assert np.array_equal(pixels(Policy(augment).apply(image, params)), pixels(wanted))


@pytest.mark.parametrize("policy", ["autoaugment", "autoaugment-v0", "randaugment"])
def test_every_choice_of_a_policy_is_about_equally_frequent(policy: str) -> None:
    augment = AugmentConfig(auto_augment=policy, crop="none", randaugment=RandAugmentConfig(num_ops=3))  # type: ignore[arg-type]
    params = Policy(augment).sample(0, np.arange(14_000, dtype=np.int64))
    name, num_choices, num_ops = (OP_INDEX, 14, 3) if policy == "randaugment" else (SUB_POLICY, 25, 2)
    counts = np.bincount(params[name].reshape(14_000, -1)[:, 0], minlength=num_choices)
    assert counts.min() > 0.8 * 14_000 / num_choices
    assert params[OP_NEGATED].shape == (14_000, num_ops)
    alone = Policy(augment).sample(0, np.array([77], np.int64))
    assert all(np.array_equal(alone[name][0], params[name][77]) for name in params)


@pytest.mark.parametrize("policy", ["autoaugment", "autoaugment-v0", "randaugment", "timm", "ta_wide", "3-augment"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_policies_keep_size_and_mode_of_any_image(policy: str, mode: str) -> None:
    rand = RandAugmentConfig(implementation="timm" if policy == "timm" else "paper")
    name = "randaugment" if policy == "timm" else policy
    augment = AugmentConfig(auto_augment=name, crop="none", randaugment=rand, fill=(1, 2, 3))  # type: ignore[arg-type]
    changed = 0
    for row, params in enumerate(each_row(Policy(augment).sample(1, np.arange(120, dtype=np.int64)))):
        image = (colors() if row % 10 else colors(1, 1)).convert(mode)
        result = Policy(augment).apply(image, params)
        assert (result.size, result.mode) == (image.size, mode)
        changed += not np.array_equal(pixels(result), pixels(image))
    assert changed > 60
