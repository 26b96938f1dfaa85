"""What Prometheus reads of a server, under vLLM's names and our prefix."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from polybasic.deploy.runtime.request import Statistics
from polybasic.deploy.serve.learning import Progress

PREFIX = "polybasic:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BETWEEN_TOKENS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15),
    *(0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0),
    *(20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(float(factor * 10**power) for power in range(6) for factor in (1, 2, 5))


class Metrics:
    """Of one server, in a registry of its own.

    Args:
        model_name: the label of all of them.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self.running = self._gauge("num_requests_running", "Answers that have a sequence.")
        self.waiting = self._gauge("num_requests_waiting", "Answers that wait for a sequence.")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.generation_tokens = self._counter("generation_tokens", "New tokens.")
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first tokens.", _FIRST_TOKEN
        )
        self.between_tokens = self._histogram(
            "inter_token_latency_seconds",
            "From token to token, the first left out.",
            _BETWEEN_TOKENS,
        )
        self.latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "From arrival to a sequence.", _REQUEST
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "Of reading the prompt.", _REQUEST
        )
        self.decode_time = self._histogram(
            "request_decode_time_seconds", "After the prompt was read.", _REQUEST
        )
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Tokens of a prompt.", _TOKENS
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "New tokens of an answer.", _TOKENS
        )
        self._success = self._counter_of(
            "request_success", "Answers by their end.", "finished_reason"
        )
        self._refused = self._counter_of("requests_refused", "Requests not taken, by code.", "code")
        self.prefix_queries = self._counter(
            "prefix_cache_queries", "Tokens of prompts that were looked for in caches."
        )
        self.prefix_hits = self._counter(
            "prefix_cache_hits", "Tokens of prompts that were not read again."
        )
        self._pauses = self._counter(
            "num_preemptions", "Times that an answer gave its caches up to others."
        )
        self._lossy = self._counter("lossy_answers", "Answers by a plan that is not lossless.")
        self._tolerated = self._counter(
            "tolerated_tokens", "Tokens of lossy answers that are not the target's own."
        )
        self._passes = self._counter_of("forward_passes", "Passes after the prompt.", "member")
        self._drafts = self._counter_of(
            "spec_decode_num_drafts", "Proposals that were verified, by who proposed.", "member"
        )
        self._drafted = self._counter_of(
            "spec_decode_num_draft_tokens", "Tokens proposed, by who proposed.", "member"
        )
        self._accepted = self._counter_of(
            "spec_decode_num_accepted_tokens", "Proposed tokens that were kept.", "member"
        )
        self._accepted_at = self._counter_of(
            "spec_decode_num_accepted_tokens_per_pos",
            "The same by position in the proposal, from 0.",
            "member",
            "position",
        )

        self._learning_time = self._counter("learning_seconds", "Of learning while nobody asked.")
        self._learned_tokens = self._gauge(
            "learned_tokens", "Tokens of answers, each as often as it was learned from."
        )
        self._learned_heads = self._gauge("learned_heads", "Heads that have taken another's place.")
        self._tokens_a_round = Gauge(
            f"{PREFIX}learning_tokens_a_round",
            "Expected of greedy drafts, over answers not yet learned from, by weights.",
            ["model_name", "weights"],
            registry=self.registry,
        )

    def text(self) -> bytes:
        """In Prometheus' format."""
        return generate_latest(self.registry)

    def ended(self, reason: str) -> None:
        """Count an answer: "stop", "length", "abort" or "error"."""
        self._success.labels(self._model_name, reason).inc()

    def refused(self, code: str) -> None:
        """Count a request that was not taken."""
        self._refused.labels(self._model_name, code).inc()

    def learning(self, progress: Progress, seconds: float) -> None:
        """Count a piece of learning."""
        self._learning_time.inc(seconds)
        self._learned_tokens.set(progress.num_tokens)
        self._learned_heads.set(progress.num_heads)
        for weights, found in ("served", progress.served), ("learned", progress.learned):
            if found is not None:
                self._tokens_a_round.labels(self._model_name, weights).set(found)

    def cost(self, statistics: Statistics) -> None:
        """Count what an answer cost, however it has ended."""
        name = self._model_name
        self.prefill_time.observe(statistics.prefill_seconds)
        self.decode_time.observe(statistics.seconds - statistics.prefill_seconds)
        self.request_prompt_tokens.observe(statistics.num_prompt_tokens)
        self.request_generation_tokens.observe(statistics.num_tokens)
        self.prefix_queries.inc(statistics.num_prompt_tokens)
        self.prefix_hits.inc(statistics.num_cached_tokens)
        self._pauses.inc(statistics.num_pauses)
        if statistics.num_tolerated is not None:
            self._lossy.inc()
            self._tolerated.inc(statistics.num_tolerated)
        for member, num in statistics.forward_passes.items():
            self._passes.labels(name, member).inc(num)
        for member, proposals in statistics.proposals.items():
            self._drafts.labels(name, member).inc(proposals.num_drafts)
            self._drafted.labels(name, member).inc(proposals.num_tokens)
            self._accepted.labels(name, member).inc(sum(proposals.accepted))
            for position, num in enumerate(proposals.accepted):
                self._accepted_at.labels(name, member, str(position)).inc(num)

    def _gauge(self, name: str, help: str) -> Gauge:
        made = Gauge(PREFIX + name, help, ["model_name"], registry=self.registry)
        return made.labels(self._model_name)

    def _counter(self, name: str, help: str) -> Counter:
        return self._counter_of(name, help).labels(self._model_name)

    def _counter_of(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, help, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(
            PREFIX + name, help, ["model_name"], buckets=buckets, registry=self.registry
        )
        return made.labels(self._model_name)
