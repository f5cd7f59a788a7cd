"""HVD2xx: Arguments of a call.

Each block is a code: its title, what raises it, cause and remedy (row.py says how a page is read). What Python tells
comes first, then what the core tells.
Tests find the texts with these codes, and fail if a code is not here.
"""

from .row import family

_PYTHON = """
HVD201 Not a tensor of this framework
raises: TypeError
cause: A collective was given something that is no tensor (or array) of the framework whose hvdlite module was called.
remedy: Convert it first (`torch.as_tensor`, `np.asarray`), import the module of your framework (`import hvdlite.torch
as hvd`), or send Python objects by `hvd.broadcast_object` and `hvd.allgather_object`.

HVD202 A dtype that hvdlite does not reduce or send
raises: ValueError, HvdArgumentError
cause: The tensor's dtype is none of those that the text lists, or this operation has no meaning for it (complex
numbers, text, packed types).
remedy: Cast it first, for example to float32; send complex numbers as two reals (`torch.view_as_real`).

HVD203 A tensor whose memory cannot be used as it is
raises: ValueError, TypeError, HvdArgumentError
cause: The tensor is sparse, on a device that hvdlite does not know, masked, without memory of its own (a DTensor or
another wrapper, a tensor inside of `torch.func`, a resized storage), or read-only or expanded while the call writes it.
remedy: Make it dense or move it (`.to_dense()`, `.cpu()`), use the tensors that a wrapper is made of (`.to_local()` of
a DTensor), fill masked arrays, or use the form of the call without the underscore at its end, or a copy.

HVD204 A name or a priority that cannot be
raises: TypeError, ValueError
cause: `name` must be a text without NUL characters or None; `priority` an int of 32 bits.
remedy: Correct the argument that the text shows.

HVD205 The same name is in flight already
raises: ValueError
cause: A collective was submitted under a name that this rank is already waiting for: a name stands for one tensor at a
time.
remedy: Synchronize the first before you submit it again, or give each tensor a name of its own (or none).
example: Requested a collective of a tensor with the same name as another tensor that is currently being processed:
'loss' is in flight already. Synchronize it first, or give each tensor its own name.

HVD206 An op that is not known, or two that contradict
raises: ValueError
cause: `op` is none of hvdlite's, or both `op` and the older `average` were given.
remedy: Give `op=hvd.Average`, `hvd.Sum`, `hvd.Min`, `hvd.Max`, `hvd.Product` or `hvd.Adasum`, and leave `average` out.

HVD207 An op that has no meaning here
raises: ValueError, HvdArgumentError, NotImplementedError
cause: Sparse tensors can only be averaged or summed; minimum, maximum and product have no gradient; factors do not
apply to sparse ones.
remedy: Use `hvd.Average` or `hvd.Sum`, make the tensor dense (`sparse_as_dense=True`), or detach it where no gradient
is wanted.

HVD208 Not a compression
raises: TypeError, ValueError
cause: `compression` must have the functions `compress` and `decompress`, as `hvd.Compression.fp16` has, and `compress`
must return a tensor and what `decompress` needs.
remedy: Use `hvd.Compression.none`, `.fp16` or `.bf16`, or correct your own class.

HVD209 The splits of an alltoall do not fit
raises: HvdArgumentError, TypeError
cause: `splits` says how many rows go to each rank: one whole number of at least 0 for each, whose sum is no more than
the tensor's first dimension. Without it the first dimension must be a multiple of the number of ranks.
remedy: Give one number per rank of the process set, as a list or a tensor of one dimension.

HVD210 A scalar where a dimension is needed
raises: HvdArgumentError
cause: Gathering, scattering and alike go along the first dimension, and this tensor has none.
remedy: Reshape it: `tensor.reshape(1)`.

HVD211 Not a group of tensors
raises: TypeError
cause: A grouped collective takes a list or a tuple of tensors.
remedy: Put the tensors in a list: `hvd.grouped_allreduce([a, b])`.

HVD212 Not a process set
raises: TypeError, ValueError
cause: `process_set` must be a `hvd.ProcessSet` or `hvd.global_process_set`, not a list of ranks or a number.
remedy: Make one by `hvd.ProcessSet([0, 1])`, register it, and give that.

HVD213 A process set that is not registered
raises: ValueError
cause: A process set can be used once all ranks have registered it, until it is removed or `hvd.shutdown()` is called;
it can be registered once, and no other may have the same ranks twice at `hvd.init()`.
remedy: Give it to `hvd.init(process_sets=[...])`, or call `hvd.add_process_set(it)` on all ranks, members or not; do so
again after a shutdown and before a saved model is opened that uses it.

HVD214 This rank is not in the process set
raises: ValueError
cause: A collective over a process set was called on a rank that is no member, or a rank was asked for that is none.
Ranks are always the global ones.
remedy: Call it on members only: `if process_set.included():`. Give `root_rank` as a global rank that is a member.

HVD215 The ranks of a process set cannot be
raises: ValueError
cause: A process set needs at least one rank; each is named once, is a whole number, and is less than the number of
ranks. One with all ranks is `hvd.global_process_set` already.
remedy: Correct the list; sizes that depend on the job come from `hvd.size()`.

HVD216 There is no such rank
raises: ValueError, TypeError
cause: A root, sender or receiver is no whole number between 0 and `hvd.size() - 1`.
remedy: Give a global rank of this job.

HVD217 A rank sends to itself
raises: ValueError
cause: `hvd.send` and `hvd.recv` are for two different ranks.
remedy: Copy the tensor where both are the same rank.

HVD218 Not a handle, or one whose result is gone
raises: ValueError
cause: `synchronize` and `poll` take what an asynchronous collective returned, once: with the result the handle ends.
After `hvd.shutdown()` earlier handles are gone, too.
remedy: Keep the handle, synchronize it once, and keep the result.

HVD219 Not the number of a device
raises: TypeError
cause: `device` must be the number of a device, or -1 for the CPU.
remedy: Give `tensor.device.index`, or leave the argument out.

HVD220 A shape or size of memory that cannot be
raises: ValueError, TypeError
cause: `hvd.empty` needs a whole number or a sequence of them, none negative, and a dtype of the framework.
remedy: Correct the argument that the text shows.

HVD221 A mesh that does not fit the job
raises: ValueError
cause: The lengths of a mesh's axes multiply to another number than that of the ranks, an axis is unknown, or a place
lies outside.
remedy: Leave one axis at -1, which takes the rest, and start a number of ranks that the others divide.

HVD222 A number that an optimizer cannot take
raises: ValueError
cause: `backward_passes_per_step` must be a whole number of at least 1; `gradient_predivide_factor` and `bucket_cap_mb`
must be above 0.
remedy: Correct the argument that the text shows.

HVD223 Not an optimizer or tape that can be wrapped
raises: TypeError, ValueError
cause: `DistributedOptimizer` got something that is no optimizer of this framework, or one that is wrapped already;
`DistributedGradientTape` got no tape.
remedy: Wrap an optimizer of the framework whose hvdlite module you import, once. With Keras 2 (tf_keras) set
`TF_USE_LEGACY_KERAS=1` before TensorFlow is imported.

HVD224 Arguments of an optimizer that exclude each other
raises: ValueError, AssertionError
cause: Some arguments make sense only together, such as `gradient_predivide_factor` with `op=hvd.Average`, and some
never, such as Adasum with averages of passes or without synchronization; local layers must be layers.
remedy: Leave out the one that the text names.

HVD225 named_parameters does not fit the optimizer
raises: ValueError
cause: `named_parameters` must name every parameter of the optimizer, each once, as pairs of name and parameter.
remedy: Give `model.named_parameters()` of the model whose parameters the optimizer has; with several models put a
prefix before their names.

HVD226 Groups of gradients that cannot be
raises: ValueError
cause: `groups` must be a positive number, or lists of parameters of this optimizer, each in one list at most.
remedy: Give a number of groups, or lists of the model's own parameters.

HVD227 A communication hook that cannot be used so
raises: ValueError, TypeError, RuntimeError
cause: `register_comm_hook` takes one function `hook(state, bucket)` per optimizer, without compression or another op
beside it; the hook returns a tensor as long as the bucket, a Future of one, or a handle.
remedy: Look at what the text names; return `bucket.buffer()` or something of the same length.

HVD228 A distributed optimizer cannot be copied or pickled
raises: TypeError
cause: Its hooks belong to this process and these parameters.
remedy: Save `optimizer.state_dict()`. For a copied model make a new optimizer, load the state, and wrap that in
`hvd.DistributedOptimizer`.

HVD229 uneven_inputs cannot be used with this optimizer
raises: TypeError, ValueError
cause: Ranks that run out of data take part with zeros, which only sums and averages over all ranks bear, and a comm
hook does not know of.
remedy: Use `op=hvd.Average`, `hvd.Sum` or `hvd.WeightedAverage`, the global process set, and no comm hook.

HVD230 Weights of an average that cannot be
raises: ValueError
cause: A weight of `WeightedAverage` is negative or no finite number, or the weights of all ranks were 0 in one round.
remedy: Give each rank a finite weight of at least 0, and at least one above 0, for instance the number of its samples.

HVD231 A sparse gradient where only dense ones can travel
raises: ValueError
cause: An embedding with `sparse=True` (or `tf.IndexedSlices`) gives sparse gradients, and groups, several passes per
step and ops other than average and sum need dense ones.
remedy: Give `sparse_as_dense=True`, leave the parameter out of groups, or use `hvd.Average` or `hvd.Sum`.

HVD232 A gradient was added to while its average was under way
raises: HvdError
cause: Backward passes followed each other without `step()` or `zero_grad()` between, so that one would add to what
already is the result of all ranks.
remedy: Call `zero_grad()` and repeat the step. To accumulate, give `backward_passes_per_step=N` or use
`optimizer.no_sync()`.

HVD233 A newer optimizer has this parameter
raises: HvdError
cause: Two `DistributedOptimizer`s were made for the same parameter; gradients are averaged for one only.
remedy: Wrap once, and use the newest one.

HVD234 A collective inside of a CUDA graph
raises: HvdError
cause: A CUDA graph is being captured, and what ranks agree on at run time cannot be part of it.
remedy: Capture forward and backward under `optimizer.no_sync()`, and call collectives or `step()` outside of the
capture.

HVD235 Not parameters or state that can be broadcast
raises: ValueError, TypeError
cause: `broadcast_parameters` takes a `state_dict()` or a list of pairs of name and tensor, with names that are unique;
`broadcast_state` takes things that have a `state_dict`.
remedy: Give `model.state_dict()` or `model.named_parameters()`; send other objects by `hvd.broadcast_object`, or as
`extra=`.

HVD236 SyncBatchNorm cannot work on this input or layer
raises: ValueError, TypeError
cause: The input has too few dimensions, other channels than the layer, or one value per channel on all ranks together;
or a layer to convert does not know its size yet.
remedy: Check the shape before the layer; use batches with more than one value per channel; run one batch through lazy
layers before converting.

HVD237 check_consistency cannot compare this
raises: ValueError, TypeError, RuntimeError
cause: It takes tensors with unique names and values. A value could not be read, or not be told from other ranks'.
remedy: Give `model.state_dict()` (PyTorch), the model or its variables (TensorFlow, Keras), and of another object what
lies in it: numbers, texts, arrays, and dicts, lists and sets of them. Meta tensors have no values.

HVD238 An argument of a Keras callback that cannot be
raises: ValueError, TypeError
cause: A callback lacks a value that it needs (`initial_lr`, `steps_per_epoch`), or was given one of another kind.
remedy: Give the argument that the text names.

HVD239 A Keras model or its saved state does not fit
raises: ValueError
cause: The model is not built yet, or what was saved belongs to an optimizer with other variables.
remedy: Build the model first (`model.build(input_shape)` or one batch), in the same way as when it was saved, with the
same optimizer.

HVD240 Data that cannot be sharded so
raises: ValueError, TypeError, IndexError
cause: `hvd.data.shard` needs something with a length (or that can be iterated, without `shuffle`); arrays that belong
together must be equally long; an index lies outside of a rank's part.
remedy: Make it a list or a Dataset, check the lengths, and count by `len(shard)`.

HVD241 All ranks have read the same first batch
raises: a warning
cause: Every rank reads the whole data in the same order, so that all compute the same gradients and more ranks gain
nothing.
remedy: Give each rank its part: `hvd.data.shard(dataset)`, a `DistributedSampler`, or `dataset.shard(hvd.size(),
hvd.rank())`; where data is made up, a seed per rank.

HVD242 An argument or an order of calls that costs or means nothing
raises: TypeError, ValueError, a warning
cause: A call that measures, records or reports was given something of another kind; or `optimizer.step()` follows
`synchronize()` without `skip_synchronize()`, which averages twice.
remedy: Correct the argument that the text shows. After `optimizer.synchronize()` call `step()` within `with
optimizer.skip_synchronize():`.

HVD243 A window of backward passes begins anew, or keeps its sums
raises: a warning
cause: Weights or a model were loaded in the middle of `backward_passes_per_step`, or a saved model does not say how
many passes its window had.
remedy: Load weights before the first pass or when a window has ended; give `backward_passes_per_step` to `load_model`.

HVD244 Arguments of hvd.run that cannot be
raises: TypeError, ValueError
cause: `hvd.run` needs a function and a whole number of ranks; some arguments exclude each other.
remedy: Leave out the one that the text names.

HVD245 A function, its arguments or its result cannot be sent to ranks
raises: TypeError
cause: `hvd.run` pickles what goes to the ranks and what comes back, and something in it (a lock, an open file, a
generator) cannot be pickled.
remedy: Make such things inside of the function, and return plain values, arrays or tensors.

HVD246 A part of Horovod that comes with a later version
raises: HvdNotYetError, a line of hvdlite-run
cause: The call or flag exists in Horovod, and this version of hvdlite does not have it yet, or never will because
something else stands in its place.
remedy: The text says what to do until then; MIGRATING.md has the whole list.

HVD247 Something of TensorFlow's graphs is used eagerly, or the other way round
raises: ValueError, TypeError, RuntimeError
cause: A symbolic tensor has no value yet, a variable of a graph needs a session, or a function that compares or sends
values was called inside of `tf.function`.
remedy: Call it outside of `tf.function`, between steps; with graphs of TensorFlow 1 give the session.

HVD248 A collective cannot be compiled by XLA
raises: HvdNotYetError
cause: `jit_compile=True` (in Keras, `"auto"` may choose it) asks XLA to compile the step, and collectives that wait for
other ranks cannot be part of it.
remedy: Say `jit_compile=False` in `model.compile` or `tf.function`.

HVD249 A collective inside of a parallel map over a dataset
raises: HvdArgumentError
cause: A function that a dataset calls for several elements at a time runs in another order on every rank, so ranks
would wait for each other in circles.
remedy: Leave `num_parallel_calls` away there, or call the collective where the dataset is iterated.
"""

# From 250 on: the core's.
_CORE = """
HVD251 A tensor's shape or memory cannot be
raises: HvdArgumentError
cause: The tensor has too many dimensions (8 at most), a negative one, or no memory though it has elements.
remedy: Reshape it before the call (`tensor.reshape(-1)` and back). A tensor without memory was freed or moved to the
`meta` device: give the collective one that holds numbers.

HVD252 This operation cannot reduce this tensor
raises: HvdArgumentError
cause: No average or scale of bools, Adasum for floats alone; Adasum combines the tensors of at most 64 ranks.
remedy: Cast the tensor (`tensor.float()`), or use another `op`. With more ranks than Adasum takes, sum or average on
the ranks of a host first.

HVD257 A send that has no other end
raises: HvdArgumentError
cause: A send joins two different ranks that call it with the same name; it cannot be in a group, and only the two take
part.
remedy: Give the same `name` on both ends and let only these two call it; copy the tensor where both are the same rank.

HVD259 A group with more members than the cache
raises: HvdArgumentError
cause: All tensors of a grouped collective are kept until the last has come, and the cache has fewer places; or a tensor
has more than 2^63 elements.
remedy: Raise `HVDLITE_CACHE_CAPACITY` (`--cache-capacity`), or make the groups smaller.

HVD263 Too many process sets
raises: HvdArgumentError
cause: 255 process sets are open beside the global one.
remedy: Remove those that are no longer needed (`hvd.remove_process_set`), and make sets once, not in every step.

HVD264 The global process set cannot be removed
raises: HvdArgumentError
cause: `hvd.remove_process_set` was given the set of all ranks.
remedy: Remove only sets that were added. The global one ends with `hvd.shutdown()`.

HVD266 Too many collectives in flight
raises: MemoryError
cause: 65,536 asynchronous collectives of this process have not been synchronized.
remedy: Call `hvd.synchronize(handle)` for each handle, once a step at the latest; use grouped calls for many tensors.

HVD267 This rank has joined already
raises: ValueError
cause: `hvd.join()` was called a second time while the first had not come back.
remedy: Let one thread call `hvd.join()`, once at the end of its data, and wait for it.
"""

FAMILY = family(2, "Arguments of a call", _PYTHON + _CORE)
