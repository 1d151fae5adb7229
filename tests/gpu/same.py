"What both GPUs, the pretended and the real one, are asked."
import pytest

def assert_rows(rows, others, tolerance=2e-3):
    "Two lists of metrics are as good as equal, times apart."
    for row, other in zip(rows, others, strict=True):
        a, b = ({k: v for k, v in r.items() if v is not None and k != "tokens_per_second"}
                for r in (row, other))
        assert a == pytest.approx(b, rel=tolerance, abs=tolerance)
