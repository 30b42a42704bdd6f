"""What calibration asks of its rows: exchangeable with what will come, one per family, unseen by training and dev."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from ..data.splits import check_overlap
from ..errors import CalibrationError
from ..records import Example

logger = logging.getLogger(__name__)


def check_disjoint(splits: Mapping[str, Sequence[Example]]) -> None:
    """Raise CalibrationError where two splits share a family or a source text: the certificate would not hold."""
    overlap = check_overlap(splits)
    if overlap:
        raise CalibrationError(
            f"{overlap}: these rows are not exchangeable with new articles, so nothing can be certified; "
            "split by family anew"
        )


def check_families(examples: Sequence[Example]) -> None:
    """Raise CalibrationError where a family has two rows (they are not independent); warn of repeated ids."""
    families = Counter(example.family for example in examples)
    repeated = [family for family, count in families.items() if count > 1]
    if repeated:
        raise CalibrationError(
            f"{len(repeated)} families have more than one calibration row, such as {repeated[0]!r}: rows of a family "
            "are not independent; keep one row of each"
        )
    ids = Counter(example.id for example in examples)
    twice = [name for name, count in ids.items() if count > 1]
    if twice:
        logger.warning("%d calibration ids occur more than once, such as %r", len(twice), twice[0])
