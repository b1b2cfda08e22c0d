"""SGLangEngine: the RolloutEngine of SGLang servers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from megatron_rc.engine import OnFinished, Prompts, RolloutEngine, Sample, SamplingParams, check_request
from megatron_rc.rollout.opening import Opening
from megatron_rc.rollout.sglang.generation import Response, Run
from megatron_rc.rollout.sglang.http import Server
from megatron_rc.rollout.sglang.pool import Pool
from megatron_rc.rollout.sglang.request import Piece, RouteShape, missing_kept_ids
from megatron_rc.rollout.sglang.weights import update_servers, weight_sync
from megatron_rc.settings.sglang import SGLangSettings

_CONTROL_S = 30.0  # requests without tokens: a busy server answers them late, one that is gone never does
BELOW_CONTEXT = 4
"""A server's max_req_input_len plus this is its limit for prompt and response; it cuts longer responses silently."""


class SGLangEngine(RolloutEngine):
    """RolloutEngine over one or many SGLang servers, or the workers of an sglang-router.

    Token ids go in and come out. The log-probs of an answer are those of the distribution it was drawn from: after the
    temperature, and renormalised over the kept ids under top-p/top-k. SGLang computes top-p from the mass of the whole
    distribution, even when top-k is active. Seeds are obeyed only if all servers run with
    --enable-deterministic-inference.
    """

    def __init__(
        self,
        settings: SGLangSettings,
        hf_config: dict[str, Any],
        *,
        agree: Callable[[str | None], None],
        writer: bool,
        return_routes: bool = False,
        probe: Callable[[list[int]], list[float]] | None = None,
    ) -> None:
        """Connect to the servers; their weights are version -1 until ``update_weights``.

        Args:
            settings: servers, limits of time, and the transport of weights. The workers behind a router are asked
                directly. Tokens that a request drew within ``timeout_s`` are kept.
            hf_config: content of the trained model's config.json.
            agree: every process calls it at the end of an update; it raises on all when one passes a sentence.
            writer: this process sends the weights; exactly one does.
            return_routes: ask for the routes of every token.
            probe: the trainer's log-probs of a prompt, see ``WeightSync``.

        Raises:
            ValueError: a server cannot be reached or cannot do what is asked.
        """
        self.weight_version = -1
        self._settings, self._hf_config = settings, hf_config
        self._agree, self._writer = agree, writer
        self._routes = RouteShape.of(hf_config) if return_routes else None
        if return_routes and self._routes is None:
            raise ValueError("return_routes needs a mixture-of-experts model; hf_config names no experts")
        self._sync = weight_sync(settings, hf_config, probe)
        self._run: Run | None = None
        self._kept: dict[tuple[Any, ...], Piece] = {}
        self._pool = Pool(
            settings.urls, concurrency=settings.concurrency, timeout_s=min(settings.timeout_s, _CONTROL_S)
        )
        try:
            for server in self._pool.servers:
                self._check_server(server)
        except ValueError:
            self._pool.close()
            raise
        self._send_seeds = all(server.info.get("enable_deterministic_inference") for server in self._pool.servers)

    def check_sampling(self, params: SamplingParams) -> None:
        """Raise ValueError when a server cannot return the kept ids of this way of sampling, or ``hidden`` is set."""
        if params.hidden is not None:
            raise ValueError("hidden must be None for SGLang: only the embedded engine draws otherwise than it reports")
        for server in self._pool.servers:
            if missing := missing_kept_ids(server.info, params):
                problem, fix = missing
                raise ValueError(f"{server.url}: {problem}; {fix[0].lower()}{fix[1:].rstrip('.')}")

    def generate(
        self, prompts: Prompts, params: SamplingParams, *, n: int, seeds: Sequence[int], on_finished: OnFinished = None
    ) -> list[Sample]:
        """Sample ``n`` responses per prompt; the contract is RolloutEngine.generate.

        Every response is returned once, in order. A response that failed for good carries the reason in ``discarded``:
        length_mismatch, phantom_logprob, nan_logprob, positive_logprob, missing_support, support_mismatch,
        missing_routes, routes_bytes, retracted_with_routes, stale_version, unknown_version, empty_output,
        bad_answer, server_error, timeout, aborted.

        Raises:
            ValueError: no server is left in rotation, or what ``check_sampling`` or ``check_request`` refuses.
        """
        rows = [[int(token) for token in prompt] for prompt in prompts]
        self._pool.require_rotation()
        self.check_sampling(params)
        # a server does not refuse an id outside its vocabulary: it dies
        vocabulary, context = self._hf_config["vocab_size"], self._longest()
        limits = "max_position_embeddings, or --context-length and --max-total-tokens of the servers"
        check_request(rows, params, n=n, seeds=seeds, vocabulary=vocabulary, context=context, limited_by=limits)
        distribution = params.temperature, params.top_p, params.top_k, params.stop_token_ids
        keys = [(tuple(rows[i // n]), seed, *distribution) for i, seed in enumerate(seeds)]
        responses = [
            Response(rows[i // n], seed, i // n, self._start_of(keys[i], params)) for i, seed in enumerate(seeds)
        ]
        settings, version = self._settings, self.weight_version
        run = Run(self._pool, responses, params, settings, vocabulary, self._routes, self._send_seeds, version)
        self._run = run
        reported = 0

        def report() -> None:
            nonlocal reported
            ended = run.ended
            if on_finished is not None and ended > reported:
                on_finished(ended - reported)
            reported = ended

        try:
            self._pool.background.run(run.all(), report)
        finally:
            self._run = None
        samples = []
        for key, response in zip(keys, responses, strict=True):
            assert response.sample is not None
            samples.append(response.sample)
            if settings.partial and response.sample.discarded == "aborted" and response.piece.output_ids:
                self._kept[key] = response.piece
        return samples

    def abort(self) -> None:
        """Make a ``generate`` in another thread return soon; it discards unfinished responses as "aborted".

        With ``partial`` their tokens are kept, and the next ``generate`` with the same prompt and seed continues them.
        """
        run = self._run
        if run is not None:
            self._pool.background.soon(run.stop)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Serve ``weights`` as ``version``; every process calls it and reads all weights, the writer sends them.

        Raises:
            ValueError: no server took them; ``agree`` raises it on every process.
        """
        error, remaining = None, iter(weights)
        if self._writer:
            try:
                update_servers(self._pool, self._sync, remaining, version)
            except ValueError as failure:
                error = str(failure)
            self._pool.disown()
        for _ in remaining:
            pass
        self._agree(error)
        self._pool.take_versions(str(version), put_back=not self._writer)
        self.weight_version = version
        oldest = None if self._settings.max_lag is None else version - self._settings.max_lag
        if oldest is not None:
            self._kept = {key: piece for key, piece in self._kept.items() if piece.weight_versions[0][0] >= oldest}

    def close(self) -> None:
        """End all threads and connections."""
        try:
            self._sync.close()
        finally:
            self._pool.close()

    def _start_of(self, key: tuple[Any, ...], params: SamplingParams) -> Piece:
        """The tokens that an aborted call drew of this response; none if it never began."""
        piece = self._kept.get(key)
        if piece is None or len(piece.output_ids) >= params.max_new_tokens:
            return Piece()
        return self._kept.pop(key)

    def _check_server(self, server: Server) -> None:
        if server.info.get("preferred_sampling_params"):
            raise ValueError(f"{server.url} was started with --preferred-sampling-params, which change what is asked")
        trained, served = self._hf_config.get("model_type"), server.model.get("model_type")
        if trained and served and trained != served:
            raise ValueError(f"{server.url} serves a model of type {served!r}, the trained one is of type {trained!r}")
        if self._routes is not None and not server.info.get("enable_return_routed_experts"):
            raise ValueError(f"{server.url} returns no routes: start it with --enable-return-routed-experts")

    def _longest(self) -> int | None:
        inputs = (server.info.get("max_req_input_len") for server in self._pool.rotation)
        limits = [longest + BELOW_CONTEXT for longest in inputs if longest]
        if context := self._hf_config.get("max_position_embeddings"):
            limits.append(context)
        return min(limits, default=None)


def alone(error: str | None) -> None:
    """``agree`` of a single process."""
    if error is not None:
        raise ValueError(error)


def open_engine(opening: Opening) -> SGLangEngine:
    settings = opening.settings.sglang
    engine = SGLangEngine(
        replace(settings, sync_dir=settings.sync_dir or str(opening.output / "sync")),
        opening.hf_config,
        agree=opening.agree,
        writer=opening.writer,
        return_routes=settings.capture_routes or opening.returns_routes,
        probe=opening.probe,
    )
    try:
        # now: once a checkpoint or an evaluation is written, the settings that mend it may not change
        engine.check_sampling(opening.settings.sampling())
    except ValueError:
        engine.close()
        raise
    return engine
