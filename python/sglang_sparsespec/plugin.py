"""The SGLang plugin entry point. It runs in every process of the server, so it imports nothing heavy
itself."""


def register() -> None:
    """Register the algorithm, and the one hook that the launcher needs. SGLang calls it without arguments."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_sparsespec import algorithm, hooks

    SpeculativeAlgorithm.register(
        algorithm.NAME,
        supports_overlap=True,
        validate_server_args=algorithm.validate_server_args,
        spec_class=algorithm.SparseSpecAlgorithm,
    )(algorithm.create_worker_class)
    hooks.register(hooks.EVERYWHERE)
