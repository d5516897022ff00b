"""JetStream's own driver and gRPC server on our engine, asked by a client: a program of its own, see test_jetstream.py.

    python jetstream_program.py MODEL

Its driver kills the process when one of its threads fails, so it does not run inside pytest. Prints one line of JSON.
"""

import asyncio
import json
import os
import socket
import sys

import grpc
import jax
import numpy as np

# Was removed from jax after JetStream's last release; its driver calls it once per request.
jax.tree_map = jax.tree.map

from jetstream.core import config_lib, server_lib  # noqa: E402
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc  # noqa: E402

from rlax_stack.models.load import load_model  # noqa: E402
from rlax_stack.rollout.engine import Engine  # noqa: E402
from rlax_stack.rollout.engine_state import EngineConfig  # noqa: E402
from rlax_stack.rollout.requests import GenerationRequest  # noqa: E402
from rlax_stack.rollout.scheduler import Scheduler  # noqa: E402
from rlax_stack.serving.jetstream_adapter import JetStreamEngine, Weights  # noqa: E402
from rlax_stack.types import SamplingParams  # noqa: E402

SIZES = EngineConfig(slots=4, max_prompt_tokens=32, max_new_tokens=40, chunk_steps=8)
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [[3 + (7 * i + j) % 13 for j in range(1 + i)] for i in range(12)]
MAX_TOKENS = [1 + 3 * i for i in range(12)]


def expected(model, engine):
  """The same prompts through our scheduler alone; a stop token is not in JetStream's answer."""
  scheduler = Scheduler(engine)
  scheduler.swap_params(model.params, 0)
  stops = tuple(model.tokenizer.stop_token_ids)
  requests = [
    GenerationRequest(
      group_id=i,
      sample_index=0,
      prompt_tokens=np.asarray(prompt, np.int32),
      sampling=SamplingParams(temperature=0.0, max_tokens=most, stop_token_ids=stops),
    )
    for i, (prompt, most) in enumerate(zip(PROMPTS, MAX_TOKENS, strict=True))
  ]
  samples = [sample.tokens.tolist() for sample in scheduler.generate_all(requests)]
  return [[token for token in tokens if token not in stops] for tokens in samples]


async def ask(port, tokenizer):
  """Every prompt at once by token ids, and one by text."""
  address, credentials = f'localhost:{port}', grpc.local_channel_credentials()
  async with grpc.aio.secure_channel(address, credentials) as channel:
    stub = jetstream_pb2_grpc.OrchestratorStub(channel)
    health = await stub.HealthCheck(jetstream_pb2.HealthCheckRequest())

    async def decode(most, **content):
      tokens, text = [], ''
      request = jetstream_pb2.DecodeRequest(max_tokens=most, **content)
      async for answer in stub.Decode(request):
        tokens += answer.stream_content.samples[0].token_ids
        text += answer.stream_content.samples[0].text
      return tokens, text

    kinds = jetstream_pb2.DecodeRequest
    calls = [
      decode(most, token_content=kinds.TokenContent(token_ids=prompt))
      for prompt, most in zip(PROMPTS, MAX_TOKENS, strict=True)
    ]
    text = kinds.TextContent(text=tokenizer.decode(PROMPTS[9]))
    *answers, by_text = await asyncio.gather(*calls, decode(MAX_TOKENS[9], text_content=text))
    too_long = await decode(2, token_content=kinds.TokenContent(token_ids=[3] * 40))
    still = await stub.HealthCheck(jetstream_pb2.HealthCheckRequest())
  return {
    'live': [health.is_live, still.is_live],
    'tokens': [tokens for tokens, _ in answers],
    'by_text': by_text,
    'too_long': len(too_long[0]),
  }


def main():
  model = load_model(sys.argv[1])
  engine = Engine(model.config, SIZES)
  want = expected(model, engine)
  adapter = JetStreamEngine(
    Scheduler(engine),
    sizes=SIZES,
    weights=Weights(model.params, 0),
    tokenizer=model.tokenizer,
    sampling=GREEDY,
  )

  class Config(config_lib.ServerConfig):
    interleaved_slices = ('cpu=1',)
    interleaved_engine_create_fns = (lambda devices: adapter,)

  with socket.create_server(('localhost', 0)) as free:
    port = free.getsockname()[1]
  server = server_lib.run(
    port=port, config=Config, devices=[None], credentials=grpc.local_server_credentials()
  )
  found = asyncio.run(asyncio.wait_for(ask(port, model.tokenizer), 120))
  server.stop()
  print(json.dumps({**found, 'want': want}), flush=True)
  os._exit(0)  # its threads and its event loop would go on


if __name__ == '__main__':
  main()
