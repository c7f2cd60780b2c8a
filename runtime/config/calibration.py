"""Which calibration a plan counts with, and reading it. Effects are reads only.

In order: the file that is named (`--calibration FILE`), `planner.calibration` of the configuration, `calibration.json` in
the folder of run folders, where `hexctl profile` writes. "none" turns it off.
"""

from pathlib import Path

from planner.calibration import Calibration, decode
from runtime.config.schema import Config
from runtime.errors import ConfigError

NAME = "calibration.json"
OFF = "none"


def calibration_file(config: Config, *, named: str | None = None, root: Path | None = None) -> Path | None:
    """The file a plan of this configuration counts with; None: there is none, or it is turned off. `root`: another folder
    of run folders than the configuration's."""
    if named == OFF:
        return None
    if named is not None:
        return Path(named)
    configured = config.planner.calibration
    if configured is not None:
        return None if configured.name == OFF else configured
    usual = (root or config.run.root) / NAME
    return usual if usual.is_file() else None


def load_calibration(path: Path) -> Calibration:
    """Read a calibration file. ConfigError when it cannot be read; the planner's InvalidInput, with the place, for a bad one."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        hint = "hexctl profile writes one" if isinstance(e, FileNotFoundError) else ""
        raise ConfigError("cannot read the calibration", where=str(path), got=str(e), hint=hint) from e
    return decode(text, where=str(path))
