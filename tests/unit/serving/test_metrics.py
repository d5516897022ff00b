"""JetStream's names, live values."""

from prometheus_client.parser import text_string_to_metric_families

from rlax_stack.serving.bridge import EngineView
from rlax_stack.serving.metrics import ServingMetrics
from rlax_stack.serving.ticket import CallTimes


def samples(metrics):
  families = text_string_to_metric_families(metrics.text().decode())
  return {s.name + s.labels.get('reason', ''): s.value for f in families for s in f.samples}


def test_gauges_are_read_when_asked_and_calls_are_observed():
  view = EngineView(version=3, running=1, waiting=5)
  metrics = ServingMetrics(slots=4, view=lambda: view)
  other = ServingMetrics(slots=4, view=lambda: view)  # registries of their own
  metrics.model_load_time.set(2.5)
  metrics.startup_latency.set(4.0)
  metrics.prefilled(0.5, 100)
  times = CallTimes(10.0, admitted_s=11.0, first_token_s=11.5, finished_s=15.0)
  metrics.finished(times, prompt_tokens=7, sampled=[10, 40])
  metrics.refused('slow')
  found = samples(metrics)
  want = {
    'jetstream_prefill_backlog_size': 5,
    'num_requests_waiting': 5,
    'jetstream_slots_used_percentage': 0.25,
    'rlax_weights_version': 3,
    'jetstream_model_load_time': 2.5,
    'jetstream_server_startup_latency': 4.0,
    'jetstream_queue_duration_sum': 1.0,
    'jetstream_wait_time_per_request_sum': 1.0,
    'jetstream_request_input_length_sum': 7,
    'jetstream_request_output_length_sum': 50,
    'jetstream_time_to_first_token_sum': 1.5,
    'jetstream_time_per_output_token_sum': 0.1,
    'jetstream_time_per_prefill_token_sum': 0.005,
    'jetstream_time_per_request_sum': 5.0,
    'jetstream_request_success_count_total': 1,
    'rlax_refused_totalslow': 1,
  }
  assert {name: found[name] for name in want} == want
  view = EngineView(version=4, running=4, waiting=0)
  assert samples(metrics)['jetstream_slots_used_percentage'] == 1
  assert samples(other)['jetstream_request_success_count_total'] == 0
