"""From the key registry to Textual's bindings."""

from collections.abc import Iterable, Mapping

from textual.binding import Binding, BindingType

from hexctl.tui.keys import KEYS, Key, Where, keys_at


def _binding(key: Key, action: str) -> Binding:
    return Binding(",".join(key.keys), action, key.description, show=False, id=key.id)


def bindings_at(where: Iterable[Where]) -> list[BindingType]:
    """One binding an entry of these places, with the registry's id, so that a keymap can change its keys."""
    return [_binding(k, k.action) for k in keys_at(where)]


def bindings_of(actions: Mapping[str, str]) -> list[BindingType]:
    """Bindings for single entries by id, with the action a dialog gives them ("" keeps the registry's own)."""
    by_id = {k.id: k for k in KEYS}
    return [_binding(by_id[i], action or by_id[i].action) for i, action in actions.items()]
