"""Flow: ledger, admission, staleness, dispatch and the queue to the trainer, behind one synchronous object."""

from runtime.rl.flow.flow import Flow
from runtime.rl.flow.open import flow_settings, open_flow
from runtime.rl.flow.state import FlowFiles, FlowSettings

__all__ = ["Flow", "FlowFiles", "FlowSettings", "flow_settings", "open_flow"]
