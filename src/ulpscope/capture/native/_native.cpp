// SPDX-License-Identifier: Apache-2.0
// Answers the questions that `_compiled.pyx` asks torch thousands of times in a step, past Python: tensor facts, graphs, hooks on their nodes.
//
// It is compiled against the headers of the installed torch, on request (`ulpscope build`), and is only good for that very torch; without it
// Python asks the same. Nothing here knows about records: a table of C functions is handed to `_compiled`, which calls them with the GIL
// held. Tensors and nodes are passed as addresses and belong to the caller; the results of `hold`, `new_edges` and `plan_call`
// belong to it until it gives them to `let_go`, `free_edges` and `free_plan`.

#include <Python.h>

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/version.h>

#include <typeindex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;
using torch::autograd::variable_list;
using NodePtr = decltype(torch::autograd::Edge::function);

// begin of layouts: tools/layouts.py writes it
constexpr int kVersion = 1;
constexpr int64_t kMostDims = 25;
typedef int (*Callback)(PyObject* hook, const void* left, const void* entered);
// A tensor. It begins as DLPack's DLTensor does. `mirrors`: 1 where values are negated, 2 where they are conjugated.
struct TensorFacts {
  const void *data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
  const int64_t *shape;
  const int64_t *strides;
  uint64_t byte_offset;
  void *storage;
  int64_t version;
  int requires_grad;
  int mirrors;
};
static_assert(sizeof(void *) != 8 || (sizeof(TensorFacts) == 72 && offsetof(TensorFacts, data) == 0 && offsetof(TensorFacts,
    device_type) == 8 && offsetof(TensorFacts, device_id) == 12 && offsetof(TensorFacts, ndim) == 16 && offsetof(TensorFacts, code) ==
    20 && offsetof(TensorFacts, bits) == 21 && offsetof(TensorFacts, lanes) == 22 && offsetof(TensorFacts, shape) == 24 &&
    offsetof(TensorFacts, strides) == 32 && offsetof(TensorFacts, byte_offset) == 40 && offsetof(TensorFacts, storage) == 48 &&
    offsetof(TensorFacts, version) == 56 && offsetof(TensorFacts, requires_grad) == 64 && offsetof(TensorFacts, mirrors) == 68),
    "tools/layouts.py");
// Where a gradient enters a node that a call owns.
struct Entering {
  int32_t place;
  int32_t result;
  int32_t is_base;
};
static_assert(sizeof(void *) != 8 || (sizeof(Entering) == 12 && offsetof(Entering, place) == 0 && offsetof(Entering, result) == 4 &&
    offsetof(Entering, is_base) == 8), "tools/layouts.py");
// Where it leaves; no view, one in another shape (1), a transposed one (2), or a cast of a float32 leaf (3).
struct Leaving {
  int32_t place;
  int32_t input;
  int32_t view;
};
static_assert(sizeof(void *) != 8 || (sizeof(Leaving) == 12 && offsetof(Leaving, place) == 0 && offsetof(Leaving, input) == 4 &&
    offsetof(Leaving, view) == 8), "tools/layouts.py");
// A node, and ranges of the above; `entering` is -1 where no result comes from here.
struct Watched {
  Node *node;
  int32_t entering;
  int32_t num_entering;
  int32_t leaving;
  int32_t num_leaving;
};
static_assert(sizeof(void *) != 8 || (sizeof(Watched) == 24 && offsetof(Watched, node) == 0 && offsetof(Watched, entering) == 8 &&
    offsetof(Watched, num_entering) == 12 && offsetof(Watched, leaving) == 16 && offsetof(Watched, num_leaving) == 20),
    "tools/layouts.py");
// The nodes that a finished call owns; `behind` is where the one result is a view of an inner one.
struct Plan {
  const Watched *watched;
  const Entering *entering;
  const Leaving *leaving;
  Node *behind;
  void *planner;
  int32_t count;
};
static_assert(sizeof(void *) != 8 || (sizeof(Plan) == 48 && offsetof(Plan, watched) == 0 && offsetof(Plan, entering) == 8 &&
    offsetof(Plan, leaving) == 16 && offsetof(Plan, behind) == 24 && offsetof(Plan, planner) == 32 && offsetof(Plan, count) == 40),
    "tools/layouts.py");
struct Native {
  const void* (*tensor_of)(PyObject*);
  PyObject* (*object_of)(const void*);
  int (*look)(const void*, TensorFacts*);
  int64_t (*version_of)(const void*);
  void* (*hold)(const void*);
  int (*is_as_taken)(const void*, int64_t, uint64_t);
  PyObject* (*object_of_held)(const void*, int32_t, const int64_t*, const int64_t*);
  void (*let_go)(void*);
  void* (*weak_reference)(void*);
  int (*state)();
  int (*is_seen)();
  int (*graph_task)();
  int (*shut_eyes)();
  void (*open_eyes)(int);
  void* (*new_edges)();
  void (*free_edges)(void*);
  int (*add_edge)(void*, const void*, int32_t);
  int (*add_leaf)(void*, const void*, int32_t);
  int (*begin_call)(void*);
  int (*plan_call)(void*, const void* const*, int32_t, int32_t, Plan*);
  void (*free_plan)(Plan*);
  const void* (*gradient_at)(const void*, int64_t);
  int (*hook_before)(void*, PyObject*);
  int (*hook_after)(void*, PyObject*);
  void (*set_callback)(Callback);
};
// end of layouts: tools/layouts.py writes it

const at::Tensor& as_tensor(const void* tensor) {
  return *static_cast<const at::Tensor*>(tensor);
}

// Turns a C++ exception into one of Python, which the caller passes on.
template <typename Work>
int guarded(Work work) noexcept {
  try {
    work();
    return 0;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "torch failed without saying why");
  }
  return -1;
}

// ---- tensors

const void* tensor_of(PyObject* object) {
  return &THPVariable_Unpack(object);
}

PyObject* object_of(const void* tensor) noexcept {
  PyObject* object = nullptr;
  guarded([&] { object = THPVariable_Wrap(as_tensor(tensor)); });
  return object;
}

// Kinds without plain memory, or whose values another layer decides.
const c10::DispatchKeySet& odd_keys() {
  using Key = c10::DispatchKey;
  static const c10::DispatchKeySet keys = c10::DispatchKeySet(
      {Key::Python, Key::FuncTorchBatched, Key::FuncTorchGradWrapper, Key::Functionalize, Key::ZeroTensor, Key::NestedTensor});
  return keys;
}

// Returns NULL where there is no memory, or torch refuses it: graphs of the compiler take the memory of results back.
const char* memory_of(const c10::StorageImpl& storage) noexcept {
  try {
    return static_cast<const char*>(storage.data());
  } catch (...) {
    return nullptr;
  }
}

bool look_at(c10::TensorImpl* impl, TensorFacts* facts) {
  const auto keys = impl->key_set();
  if ((keys & odd_keys()).raw_repr() != 0 || !impl->has_storage() || impl->layout() != c10::kStrided || impl->is_inference() ||
      impl->has_symbolic_sizes_strides() || impl->dim() > kMostDims || c10::isQIntType(c10::typeMetaToScalarType(impl->dtype())) ||
      impl->is_meta()) {
    return false;
  }
  const auto& storage = impl->unsafe_storage();
  const auto device = impl->device();
  const char* memory = memory_of(*storage.unsafeGetStorageImpl());
  if (memory == nullptr) return false;
  facts->data = impl->numel() == 0 ? nullptr : memory + impl->itemsize() * impl->storage_offset();
  facts->device_type = device.is_cpu() ? 1 : device.is_cuda() ? 2 : 1000 + static_cast<int32_t>(device.type());  // DLPack's, if it has one
  facts->device_id = device.index();
  facts->ndim = static_cast<int32_t>(impl->dim());
  facts->code = static_cast<uint8_t>(c10::typeMetaToScalarType(impl->dtype()));
  facts->bits = 0;
  facts->lanes = 0;
  facts->shape = impl->sizes().data();
  facts->strides = impl->strides().data();
  facts->byte_offset = 0;
  facts->storage = storage.unsafeGetStorageImpl();
  facts->version = impl->version_counter().current_version();
  facts->requires_grad = impl->requires_grad();
  facts->mirrors = (keys.has(c10::DispatchKey::Negative) ? 1 : 0) + (keys.has(c10::DispatchKey::Conjugate) ? 2 : 0);
  return true;
}

// Returns 1, or 0 for a kind of tensor that has to be asked in Python.
int look(const void* given, TensorFacts* facts) noexcept {
  try {
    return look_at(as_tensor(given).unsafeGetTensorImpl(), facts);
  } catch (...) {
    return 0;
  }
}

// Returns -1 where the tensor has no version.
int64_t version_of(const void* given) noexcept {
  c10::TensorImpl* impl = as_tensor(given).unsafeGetTensorImpl();
  return impl->is_inference() ? -1 : static_cast<int64_t>(impl->version_counter().current_version());
}

// The memory of a tensor that waits to be read, and its version, which shows a write. The tensor itself is not held: autograd gives a
// gradient without another reference to its parameter.
struct Held {
  c10::intrusive_ptr<c10::StorageImpl> storage;
  std::optional<c10::VariableVersion> version;  // not below autograd: torch takes a new tensor over only if nobody shares its version
  c10::ScalarType dtype;
  int64_t offset;
};

void* hold(const void* given) noexcept {
  c10::TensorImpl* impl = as_tensor(given).unsafeGetTensorImpl();
  auto storage = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(impl->unsafe_storage().unsafeGetStorageImpl());
  auto* held = new (std::nothrow) Held{std::move(storage), std::nullopt, c10::typeMetaToScalarType(impl->dtype()), impl->storage_offset()};
  if (held != nullptr && !c10::impl::tls_local_dispatch_key_set().excluded_.has(c10::DispatchKey::ADInplaceOrView)) {
    held->version = impl->version_counter();
  }
  return held;
}

int is_as_taken(const void* given, int64_t version, uint64_t address) noexcept {
  const Held& held = *static_cast<const Held*>(given);
  const char* memory = memory_of(*held.storage);
  return memory != nullptr && reinterpret_cast<uint64_t>(memory + c10::elementSize(held.dtype) * held.offset) == address &&
      (!held.version || static_cast<int64_t>(held.version->current_version()) == version);
}

// Makes a tensor of that memory; it belongs to the caller.
PyObject* object_of_held(const void* given, int32_t ndim, const int64_t* shape, const int64_t* strides) noexcept {
  const Held& held = *static_cast<const Held*>(given);
  PyObject* object = nullptr;
  guarded([&] {
    auto tensor = at::empty({0}, at::TensorOptions(held.storage->device()).dtype(held.dtype));
    const auto dims = static_cast<size_t>(ndim);
    tensor.set_(c10::Storage(held.storage), held.offset, {shape, dims}, {strides, dims});
    object = THPVariable_Wrap(std::move(tensor));
  });
  return object;
}

void let_go(void* held) noexcept {
  delete static_cast<Held*>(held);
}

// The number that `torch.UntypedStorage._weak_ref` returns and `_free_weak_ref` takes.
void* weak_reference(void* storage) noexcept {
  return c10::raw::intrusive_ptr::make_weak(static_cast<c10::StorageImpl*>(storage));
}

// ---- the state in which a call is made

enum State { kGrad = 1, kInference = 2, kDeterministic = 4, kAutocast = 8, kTracing = 16 };

// Autocast is on for a device where its key is not excluded.
const c10::DispatchKeySet& autocast_keys() {
  static const c10::DispatchKeySet keys = [] {
    c10::DispatchKeySet all;
    for (const auto device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
      all = all.add(at::autocast::get_autocast_dispatch_key_from_device_type(device));
    }
    return all;
  }();
  return keys;
}

int state() noexcept {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  int found = 0;
  if (c10::GradMode::is_enabled()) found |= kGrad;
  if (c10::InferenceMode::is_enabled()) found |= kInference;
  if (at::globalContext().deterministicAlgorithms()) found |= kDeterministic;
  if ((keys.excluded_ & autocast_keys()) != autocast_keys()) found |= kAutocast;
  if (torch::jit::tracer::isTracing()) found |= kTracing;
  return found;
}

int is_seen() noexcept {
  return c10::impl::TorchDispatchModeTLS::stack_len() != 0 ||
      c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

int graph_task() noexcept {
  return torch::autograd::get_current_graph_task_id();
}

int shut_eyes() noexcept {
  using at::impl::PythonTorchFunctionTLS;
  const auto before = PythonTorchFunctionTLS::get_disabled_state();
  PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  return static_cast<int>(before);
}

void open_eyes(int before) noexcept {
  at::impl::PythonTorchFunctionTLS::set_disabled_state(static_cast<at::impl::TorchFunctionDisabledState>(before));
}

// ---- where the gradients of a call's inputs leave it: `backward.Edges`

struct NodeEdge {
  NodePtr node;
  uint32_t place;
  int32_t input;
};

struct Edges {
  std::vector<NodeEdge> nodes;
  std::vector<std::pair<const void*, int32_t>> leaves;
  std::vector<std::pair<at::TensorBase, int32_t>> bases;
  std::unordered_map<const Node*, std::vector<const NodeEdge*>> index;  // of the nodes, where there are many
  uint64_t first = 0;

  void add(const at::TensorBase& tensor, int32_t input) {
    const NodePtr& node = tensor.grad_fn();
    if (node == nullptr) {
      leaves.emplace_back(tensor.unsafeGetTensorImpl(), input);
    } else {
      nodes.push_back({node, static_cast<uint32_t>(tensor.output_nr()), input});
    }
  }

  int32_t input_at(const Node* node, uint32_t place) {
    if (nodes.size() <= 16) {
      for (const auto& edge : nodes) {
        if (edge.node.get() == node && edge.place == place) return edge.input;
      }
      return -1;
    }
    if (index.empty()) {
      for (const auto& edge : nodes) index[edge.node.get()].push_back(&edge);
    }
    const auto known = index.find(node);
    if (known == index.end()) return -1;
    for (const auto* edge : known->second) {
      if (edge->place == place) return edge->input;
    }
    return -1;
  }

  int32_t input_of_leaf(const Node* node) const {
    const void* variable = static_cast<const AccumulateGrad*>(node)->variable.unsafeGetTensorImpl();
    for (const auto& leaf : leaves) {
      if (leaf.first == variable) return leaf.second;
    }
    return -1;
  }

  bool owns(const Node& node, uint64_t last) const {
    return first <= node.sequence_nr() && node.sequence_nr() < last;
  }
};

// Unused objects keep their memory; the GIL guards this list.
std::vector<Edges*> spare_edges;

void* new_edges() noexcept {
  if (spare_edges.empty()) return new (std::nothrow) Edges();
  Edges* edges = spare_edges.back();
  spare_edges.pop_back();
  return edges;
}

void free_edges(void* given) noexcept {
  auto* edges = static_cast<Edges*>(given);
  if (spare_edges.size() == 64 || edges->nodes.capacity() > 1024) {
    delete edges;
    return;
  }
  edges->nodes.clear();
  edges->leaves.clear();
  edges->bases.clear();
  edges->index.clear();
  spare_edges.push_back(edges);
}

int add_edge(void* given, const void* tensor, int32_t input) noexcept {
  return guarded([&] {
    auto& edges = *static_cast<Edges*>(given);
    const at::Tensor& input_tensor = as_tensor(tensor);
    if (!input_tensor.requires_grad()) return;
    edges.add(input_tensor, input);
    if (input_tensor.is_view() && input_tensor._base().requires_grad()) edges.bases.emplace_back(input_tensor._base(), input);
  });
}

int add_leaf(void* given, const void* tensor, int32_t input) noexcept {
  return guarded([&] {
    static_cast<Edges*>(given)->leaves.emplace_back(as_tensor(tensor).unsafeGetTensorImpl(), input);
  });
}

int begin_call(void* given) noexcept {
  return guarded([&] {
    auto& edges = *static_cast<Edges*>(given);
    for (const auto& base : edges.bases) edges.add(base.first, base.second);
    edges.first = at::sequence_number::peek();
  });
}

// ---- the nodes that a finished call owns: `backward.watch_backward`

enum ViewKind { kNoView = 0, kReshaped = 1, kTransposed = 2, kCast = 3 };

int view_kind(const Node& node) {
  static thread_local std::unordered_map<std::type_index, int> known;
  const std::type_index type(typeid(node));
  const auto found = known.find(type);
  if (found != known.end()) return found->second;
  const auto name = node.name();
  const int kind = name == "ViewBackward0" || name == "UnsafeViewBackward0" ? kReshaped
                   : name == "TBackward0"                                   ? kTransposed
                   : name == "ToCopyBackward0"                              ? kCast
                                                                            : kNoView;
  known.emplace(type, kind);
  return kind;
}

bool is_leaf(const Node& node) {
  return typeid(node) == typeid(AccumulateGrad);
}

// A set of nodes that costs nothing to empty.
class Marks {
 public:
  void clear() {
    ++turn_;
    count_ = 0;
  }

  bool has(const Node* node) const {
    return places_[find(node)].turn == turn_;
  }

  void add(const Node* node) {
    if (2 * ++count_ > places_.size()) grow();
    places_[find(node)] = {node, turn_};
  }

  bool is_empty() const {
    return count_ == 0;
  }

 private:
  struct Place {
    const Node* node = nullptr;
    uint64_t turn = 0;
  };

  size_t find(const Node* node) const {
    size_t place = (reinterpret_cast<size_t>(node) >> 4) * 0x9E3779B97F4A7C15u >> 20 & (places_.size() - 1);
    while (places_[place].turn == turn_ && places_[place].node != node) place = (place + 1) & (places_.size() - 1);
    return place;
  }

  void grow() {
    auto before = std::exchange(places_, std::vector<Place>(2 * places_.size()));
    for (const auto& place : before) {
      if (place.turn == turn_) places_[find(place.node)] = place;
    }
  }

  std::vector<Place> places_ = std::vector<Place>(64);
  uint64_t turn_ = 1;
  size_t count_ = 0;
};

class Planner {
 public:
  void plan(Edges& edges, const void* const* results, int32_t count, bool looks_through, Plan* plan) {
    edges_ = &edges;
    last_ = at::sequence_number::peek();
    owned_.clear();
    watched_.clear();
    entering_.clear();
    leaving_.clear();
    *plan = {};
    if (edges.first == last_) return;
    for (int32_t number = 0; number < count; ++number) own(as_tensor(results[number]), number);
    if (owned_.empty()) return;
    if (!walk(looks_through && edges.bases.empty())) walk(false);
    for (auto& watched : watched_) gather(watched);
    *plan = {watched_.data(), entering_.data(), leaving_.data(), behind(results, count), nullptr, static_cast<int32_t>(watched_.size())};
  }

 private:
  struct Owned {
    Node* node;
    std::vector<Entering> entering;
  };

  void own(const at::TensorBase& tensor, int32_t number) {
    add(tensor, number, 0);
    if (edges_->bases.empty() || !tensor.is_view()) return;
    for (const auto& base : edges_->bases) {
      if (base.first.is_same(tensor._base())) {
        add(tensor._base(), number, 1);
        return;
      }
    }
  }

  void add(const at::TensorBase& tensor, int32_t number, int32_t is_base) {
    Node* node = tensor.grad_fn().get();
    if (node == nullptr || !edges_->owns(*node, last_)) return;
    const auto place = static_cast<int32_t>(tensor.output_nr());
    const auto known = find(node);
    if (known == owned_.size()) owned_.push_back({node, {}});
    for (const auto& entering : owned_[known].entering) {
      if (entering.place == place) return;
    }
    owned_[known].entering.push_back({place, number, is_base});
  }

  size_t find(const Node* node) const {
    size_t number = owned_.size();
    while (number > 0 && owned_[number - 1].node != node) --number;
    return number > 0 ? number - 1 : owned_.size();
  }

  // Returns false where a node cannot be looked through because two others lead to it.
  bool walk(bool looks_through) {
    watched_.clear();
    leaving_.clear();
    waiting_.clear();
    seen_.clear();
    through_.clear();
    for (const auto& owned : owned_) {
      waiting_.push_back(owned.node);
      seen_.add(owned.node);
    }
    while (!waiting_.empty()) {
      Node* node = waiting_.back();
      waiting_.pop_back();
      const auto begin = static_cast<int32_t>(leaving_.size());
      if (!walk_on(*node, looks_through)) return false;
      watched_.push_back({node, -1, 0, begin, static_cast<int32_t>(leaving_.size()) - begin});
    }
    return true;
  }

  bool walk_on(const Node& node, bool looks_through) {
    int32_t place = -1;
    for (const auto& edge : node.next_edges()) {
      ++place;
      Node* following = edge.function.get();
      if (following == nullptr) continue;
      if (!through_.is_empty() && through_.has(following)) return false;
      int32_t view = kNoView;
      int32_t input = input_behind(edge);
      if (input < 0 && !is_leaf(*following) && !seen_.has(following)) {
        input = input_behind_cast(*following);
        if (input >= 0) view = kCast;
      }
      if (input < 0 && !is_leaf(*following) && edges_->owns(*following, last_) && !seen_.has(following)) {
        if (looks_through) {
          std::tie(input, view) = look_through(*following);
        }
        if (input < 0) {
          seen_.add(following);
          waiting_.push_back(following);
        } else {
          through_.add(following);
        }
      }
      if (input >= 0) leaving_.push_back({place, input, view});
    }
    return true;
  }

  int32_t input_behind(const torch::autograd::Edge& edge) {
    const int32_t input = edges_->input_at(edge.function.get(), edge.input_nr);
    return input < 0 && is_leaf(*edge.function) ? edges_->input_of_leaf(edge.function.get()) : input;
  }

  // Autocast keeps the cast of a leaf and hands it to later calls too: the gradient that leaves the cast is the sum of them all.
  int32_t input_behind_cast(const Node& node) const {
    if (view_kind(node) != kCast || node.num_outputs() < 1 || !node.next_edge(0).is_valid()) return -1;
    const Node* leaf = node.next_edge(0).function.get();
    if (!is_leaf(*leaf) || static_cast<const AccumulateGrad*>(leaf)->variable.scalar_type() != at::kFloat) return -1;
    return edges_->input_of_leaf(leaf);
  }

  std::pair<int32_t, int32_t> look_through(const Node& node) {
    const int kind = view_kind(node);
    if (kind == kNoView || kind == kCast || node.num_outputs() != 1 || !node.next_edge(0).is_valid()) return {-1, kNoView};
    return {input_behind(node.next_edge(0)), kind};
  }

  void gather(Watched& watched) {
    const auto known = find(watched.node);
    if (known == owned_.size()) return;
    watched.entering = static_cast<int32_t>(entering_.size());
    watched.num_entering = static_cast<int32_t>(owned_[known].entering.size());
    entering_.insert(entering_.end(), owned_[known].entering.begin(), owned_[known].entering.end());
  }

  Node* behind(const void* const* results, int32_t count) const {
    if (count != 1 || owned_.size() != 1 || !as_tensor(results[0]).is_view()) return nullptr;
    const Node& node = *owned_[0].node;
    if (node.num_outputs() != 1 || !node.next_edge(0).is_valid()) return nullptr;
    Node* following = node.next_edge(0).function.get();
    return edges_->owns(*following, last_) ? following : nullptr;
  }

  Edges* edges_ = nullptr;
  uint64_t last_ = 0;
  std::vector<Owned> owned_;
  std::vector<Watched> watched_;
  std::vector<Entering> entering_;
  std::vector<Leaving> leaving_;
  std::vector<Node*> waiting_;
  Marks seen_, through_;
};

// Unused objects keep their memory; the GIL guards this list.
std::vector<Planner*> spare_planners;

void free_plan(Plan* plan) noexcept {
  auto* planner = static_cast<Planner*>(plan->planner);
  if (spare_planners.size() < 8) {
    spare_planners.push_back(planner);
  } else {
    delete planner;
  }
}

// The plan's pointers are good until it is freed; while hooks are made of it, any code may run, and plan a call of its own.
int plan_call(void* edges, const void* const* results, int32_t count, int32_t looks_through, Plan* plan) noexcept {
  return guarded([&] {
    if (spare_planners.empty()) spare_planners.push_back(new Planner());
    auto* planner = spare_planners.back();
    planner->plan(*static_cast<Edges*>(edges), results, count, looks_through != 0, plan);
    spare_planners.pop_back();
    plan->planner = planner;
  });
}

// ---- hooks

Callback callback = nullptr;

// Returns a part of a list of gradients, or NULL.
const void* gradient_at(const void* gradients, int64_t place) noexcept {
  const auto& list = *static_cast<const variable_list*>(gradients);
  return place < static_cast<int64_t>(list.size()) && list[place].defined() ? &list[place] : nullptr;
}

struct Gil {
  Gil() : state(PyGILState_Ensure()) {}
  ~Gil() {
    PyGILState_Release(state);
  }
  PyGILState_STATE state;
};

class OurHook {
 public:
  explicit OurHook(PyObject* hook) : hook_(Py_NewRef(hook)) {}
  OurHook(const OurHook&) = delete;
  OurHook& operator=(const OurHook&) = delete;
  ~OurHook() {
    if (!Py_IsInitialized()) return;
    const Gil gil;
    Py_DECREF(hook_);
  }

  void call(const variable_list& left, const variable_list& entered) const {
    const Gil gil;
    if (callback(hook_, &left, &entered) < 0) {  // the program is to end
      python_error error;
      error.persist();
      throw std::move(error);
    }
  }

  c10::SafePyObject object() const {
    return c10::SafePyObject(Py_NewRef(hook_), getPyInterpreter());
  }

 private:
  PyObject* hook_;
};

struct Before final : torch::autograd::FunctionPreHook {
  explicit Before(PyObject* hook) : hook(hook) {}
  variable_list operator()(const variable_list& gradients) override {
    hook.call(gradients, gradients);
    return gradients;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.add_pre_hook(hook.object());
  }
  OurHook hook;
};

struct After final : torch::autograd::FunctionPostHook {
  explicit After(PyObject* hook) : hook(hook) {}
  variable_list operator()(const variable_list& left, const variable_list& entered) override {
    hook.call(left, entered);
    return left;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.add_post_hook(hook.object());
  }
  OurHook hook;
};

int hook_before(void* node, PyObject* hook) noexcept {
  return guarded([&] { static_cast<Node*>(node)->add_pre_hook(std::make_unique<Before>(hook)); });
}

int hook_after(void* node, PyObject* hook) noexcept {
  return guarded([&] { static_cast<Node*>(node)->add_post_hook(std::make_unique<After>(hook)); });
}

void set_callback(Callback given) noexcept {
  callback = given;
}

// ---- the table

Native table = {
    tensor_of, object_of, look, version_of, hold, is_as_taken, object_of_held, let_go, weak_reference, state, is_seen, graph_task,
    shut_eyes, open_eyes, new_edges, free_edges, add_edge, add_leaf, begin_call, plan_call, free_plan, gradient_at, hook_before,
    hook_after, set_callback,
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
  PyObject* made = PyModule_Create(&module);
  if (made == nullptr) return nullptr;
  PyObject* capsule = PyCapsule_New(&table, "ulpscope.native", nullptr);
  if (capsule == nullptr || PyModule_AddObject(made, "TABLE", capsule) < 0 ||
      PyModule_AddIntConstant(made, "VERSION", kVersion) < 0 || PyModule_AddStringConstant(made, "TORCH", TORCH_VERSION) < 0) {
    Py_XDECREF(capsule);
    Py_DECREF(made);
    return nullptr;
  }
  return made;
}
