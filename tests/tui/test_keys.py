"""One registry: no key means two things in one place, and everything else is made from it."""

from itertools import combinations

from hexctl.tui.keys import KEYS, MAIN, SECTIONS, footer_keys, keys_at, keys_markdown, works_in
from hexctl.tui.screens.main import MainScreen
from hexctl.tui.view.chrome import help_lines
from hexctl.tui.view.text import plain

VIEWS = ("fleet", "flow", "plan", "events")


def test_ids_are_unique_and_descriptions_say_something() -> None:
    assert len({k.id for k in KEYS}) == len(KEYS)
    assert all(k.description and k.keys and k.shown for k in KEYS)
    assert all(k.brief for k in KEYS if k.order)


def test_no_key_means_two_things_in_one_view() -> None:
    for view in VIEWS:
        usable = [k for k in keys_at(MAIN) if works_in(k, view, proposal_open=True)]
        for a, b in combinations(usable, 2):
            assert not set(a.keys) & set(b.keys), (view, a.id, b.id)
    for where, _ in SECTIONS:
        for a, b in combinations(keys_at((where,)), 2):
            assert not set(a.keys) & set(b.keys), (where, a.id, b.id)


def test_reflex_keys_destroy_nothing() -> None:
    by_key = {key: k for k in keys_at(MAIN) for key in k.keys}
    assert by_key["r"].level is None
    assert "d" not in by_key
    for k in keys_at(MAIN):
        if k.level is not None and k.level >= 1 and k.id != "approve":
            assert all(key.isupper() for key in k.keys), k.id


def test_approval_exists_only_in_the_plan_view_while_a_proposal_is_open() -> None:
    for k in keys_at(("plan",)):
        assert works_in(k, "plan", proposal_open=True)
        assert not works_in(k, "plan", proposal_open=False)
        assert not any(works_in(k, v, proposal_open=True) for v in VIEWS if v != "plan")


def test_help_and_documentation_hold_every_key() -> None:
    shown = "\n".join(plain(x) for x in help_lines(80))
    table = keys_markdown()
    for k in KEYS:
        assert k.description in shown
        assert f"`{k.id}`" in table
        assert all(f"`{key}`" in table for key in k.keys)
    assert all(title in table for _, title in SECTIONS)


def test_every_action_exists_and_every_binding_carries_its_id() -> None:
    for k in keys_at(MAIN):
        assert hasattr(MainScreen, "action_" + k.action.split("(")[0]), k.action
    ids = {b.id for b in MainScreen.BINDINGS}  # type: ignore[union-attr]
    assert ids == {k.id for k in keys_at(MAIN)}


def test_the_footer_offers_what_works() -> None:
    assert {"approve", "reject"} <= {k.id for k in footer_keys("plan", proposal_open=True)}
    assert not {"approve", "reject"} & {k.id for k in footer_keys("plan", proposal_open=False)}
    assert not {"cordon", "drain"} & {k.id for k in footer_keys("flow", proposal_open=True)}
