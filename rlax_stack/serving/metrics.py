"""What Prometheus reads, under JetStream's names, in a registry of its own.

Left out are JetStream's transfer and generate backlogs: a request of this engine waits in one queue only, the prefill
backlog, and its prompt is never moved between machines. What was refused has a name of its own.
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rlax_stack.serving.bridge import EngineView
from rlax_stack.serving.ticket import CallTimes

_WAIT_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
_FIRST_TOKEN_S = (
  0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
)  # fmt: skip
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_PREFILL_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
_REQUEST_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 300, 600)
_TOKENS = tuple(2**n for n in range(18))


class ServingMetrics:
  """Counts and times of one server; gauges read the engine at the moment they are asked."""

  def __init__(self, *, slots: int, view: Callable[[], EngineView]):
    self.registry = CollectorRegistry()

    def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
      return Histogram(name, text, registry=self.registry, buckets=buckets)

    def gauge(name: str, text: str, read: Callable[[], float] | None = None) -> Gauge:
      made = Gauge(name, text, registry=self.registry)
      if read is not None:
        made.set_function(read)
      return made

    gauge('jetstream_prefill_backlog_size', 'Samples without a slot', lambda: view().waiting)
    gauge('num_requests_waiting', 'Samples without a slot', lambda: view().waiting)
    gauge(
      'jetstream_slots_used_percentage', 'Share of slots in use', lambda: view().running / slots
    )
    gauge('rlax_weights_version', 'Version of the weights in use', lambda: view().version)
    self.model_load_time = gauge('jetstream_model_load_time', 'Seconds to load the model')
    self.startup_latency = gauge('jetstream_server_startup_latency', 'Seconds to start the server')
    self._queue = histogram(
      'jetstream_queue_duration', 'Seconds from arrival to the first slot', _WAIT_S
    )
    self._wait = histogram(
      'jetstream_wait_time_per_request', 'Seconds neither prefilled nor decoded', _WAIT_S
    )
    self._input = histogram('jetstream_request_input_length', 'Prompt tokens of a request', _TOKENS)
    self._output = histogram(
      'jetstream_request_output_length', 'Sampled tokens of a request', _TOKENS
    )
    self._first_token = histogram(
      'jetstream_time_to_first_token', 'Seconds from arrival to the first token', _FIRST_TOKEN_S
    )
    self._per_token = histogram(
      'jetstream_time_per_output_token', 'Seconds of a request over its longest sample', _TOKEN_S
    )
    self._per_prefill_token = histogram(
      'jetstream_time_per_prefill_token', 'Seconds of prefill per prompt token', _PREFILL_S
    )
    self._per_request = histogram(
      'jetstream_time_per_request', 'Seconds from arrival to the end', _REQUEST_S
    )
    self._success = Counter(
      'jetstream_request_success_count', 'Requests that got all samples', registry=self.registry
    )
    self._refused = Counter(
      'rlax_refused', 'Requests that got an error, by reason', ['reason'], registry=self.registry
    )

  def prefilled(self, seconds: float, tokens: int) -> None:
    """Prompts of `tokens` tokens were computed in `seconds`."""
    self._per_prefill_token.observe(seconds / tokens)

  def finished(self, times: CallTimes, *, prompt_tokens: int, sampled: list[int]) -> None:
    """A call got all its samples, of so many tokens each."""
    end_s = times.finished_s or times.arrived_s
    admitted_s, first_s = times.admitted_s or end_s, times.first_token_s or end_s
    for waited in (self._queue, self._wait):
      waited.observe(admitted_s - times.arrived_s)
    self._input.observe(prompt_tokens)
    self._output.observe(sum(sampled))
    self._first_token.observe(first_s - times.arrived_s)
    self._per_token.observe((end_s - admitted_s) / max([1, *sampled]))
    self._per_request.observe(end_s - times.arrived_s)
    self._success.inc()

  def refused(self, reason: str) -> None:
    """A request got an error; reasons are few and fixed."""
    self._refused.labels(reason).inc()

  def text(self) -> bytes:
    """The page that Prometheus reads."""
    return generate_latest(self.registry)
