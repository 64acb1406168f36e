"""The 1797 handwritten digits of scikit-learn: 8x8 grey images in ten classes, embedded, so nothing is downloaded."""

from __future__ import annotations

import numpy as np

from shoal.app.data.source import Images, Source
from shoal.errors import InputError

# 1440 for training: no usual batch size leaves a last batch of one sample, which batch norm cannot train on.
TEST_SAMPLES = 357


def open_digits(*, image: int = 32) -> Source:
    """The digits, enlarged to `image` pixels and repeated to three channels; the same stratified split every time."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise InputError("data 'digits' needs scikit-learn; pip install scikit-learn, or choose other data") from error
    digits = load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)
    labels = digits.target.astype(np.int64)
    train, test = train_test_split(np.arange(len(labels)), test_size=TEST_SAMPLES, stratify=labels, random_state=0)
    mean, deviation = float(pixels[train].mean()), float(pixels[train].std())
    return Source(
        name="digits",
        train=Images(pixels[train], labels[train], image),
        test=Images(pixels[test], labels[test], image),
        classes=tuple(str(digit) for digit in digits.target_names),
        spatial=(image, image),
        mean=(mean,) * 3,
        deviation=(deviation,) * 3,
        padding=image // 32,
    )
