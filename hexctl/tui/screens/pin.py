"""After `p`: r pins to rollout, t to training, x unpins, anything else goes back."""

from typing import ClassVar

from textual import events
from textual.binding import BindingType

from hexctl.tui.keys import keys_at
from hexctl.tui.pen import Pen
from hexctl.tui.screens.bindings import bindings_at, bindings_of
from hexctl.tui.screens.dialog import Dialog
from hexctl.tui.view.text import Span, line


class PinScreen(Dialog[str | None], inherit_bindings=False):
    """Returns "rollout", "train", "" (unpin) or None (nothing chosen)."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings_at(("pin",)), *bindings_of({"back": "cancel"})]

    def __init__(self, names: str, pen: Pen, *, ascii: bool) -> None:
        lines = tuple(line(Span(k.shown, "key"), Span(f"  {k.description}")) for k in keys_at(("pin",)))
        super().__init__(
            f"Pin {names}", lambda _w, _h: lines, len(lines), pen, width=max(36, len(names) + 12), ascii=ascii
        )

    def action_choose(self, role: str) -> None:
        """One of the registry's choices."""
        self.dismiss(role)

    def action_cancel(self) -> None:
        """Nothing chosen."""
        self.dismiss(None)

    def on_key(self, event: events.Key) -> None:
        """Any other key goes back."""
        if event.key not in {k for entry in keys_at(("pin",)) for k in entry.keys}:
            event.stop()
            self.dismiss(None)
