"""The SGLang plugin entry point. It runs in every process of the server, so it imports nothing heavy
itself."""

import multiprocessing


def register() -> None:
    """Register the algorithm, and the one hook that the launcher needs. SGLang calls it without arguments.

    Raises:
        SystemExit: in a process of a server that has ended meanwhile.
    """
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_sparsespec import algorithm, compat, hooks

    # SGLang lets a process end with its parent, but one whose parent ended before that stays behind.
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        raise SystemExit("the server ended while this process was starting.")
    SpeculativeAlgorithm.register(
        algorithm.NAME,
        supports_overlap=True,
        validate_server_args=algorithm.validate_server_args,
        spec_class=algorithm.SparseSpecAlgorithm,
    )(algorithm.create_worker_class)
    hooks.register(hooks.EVERYWHERE)
    compat.add_resolution_step("handle_hicache", algorithm.want_host_tier)
