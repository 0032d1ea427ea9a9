"""A dict of the entries that were used last."""

from __future__ import annotations

from fuseopt.runtime.recent import Recent


def test_the_oldest_entry_is_released() -> None:
    released: list[int] = []
    recent: Recent[int] = Recent(2, released.append)
    for key in "aba":
        assert recent.use(key, ord(key)) == ord(key)
    recent.use("c", 3)
    assert [*recent] == ["a", "c"]
    assert released == [ord("b")]
    recent.clear()
    assert not recent
    assert sorted(released) == [3, ord("a"), ord("b")]
