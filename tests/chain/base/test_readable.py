"""Numbers as people read them."""

from polybasic.chain.base.readable import readable_bytes, readable_count


def test_readable_sizes() -> None:
    assert [readable_bytes(count) for count in (999, 1000, 999_960, 13_500_000_000)] == [
        "999 B",
        "1.0 kB",
        "1.0 MB",
        "13.5 GB",
    ]
    assert readable_count(6_738_415_616) == "6.7B"
