"""The collector of cyclic garbage in processes that hold much for their whole life."""

import gc


def settle() -> None:
    """Call once all that stays is loaded: it is not looked through again.

    Modules, model and tokenizer are some two hundred thousand objects. A full collection visits each of them with the
    interpreter's lock held, so that the process's loop stands still (`benchmarks/bench_heap.py`), and frees none.
    """
    gc.collect()  # what is garbage by now would stay with them for ever
    gc.freeze()
