// A call on its way through the table of its form, as cubin_runtime/attention/fast_path/path.py walks it in Python: the
// tests of arguments and tensors, the tensors' addresses, the stream and the scratch, the values of the launches.

#include "sender.h"

#include <math.h>
#include <string.h>

enum { BUCKETS = 256 };
enum { EQUAL, OF_TYPE, INTEGER, SCALE, SEQUENCE };  // `Kind` of table.py
enum { ADDRESS, PRODUCT };
enum { SLOT, TENSOR, CONSTANT };  // kinds of sizes, as in path.py
enum { LEVEL, OF_LEGACY, OWNER, CLAIMED };  // `NAMES` of launch/accelerator.py

#define SCALE_LIMIT 0x1p127

// In the stable ABI from Python 3.12 on, in Python 3.11 the same function; NULL before.
extern PyObject *PyObject_Vectorcall(PyObject *callable, PyObject *const *arguments, size_t count, PyObject *keywords)
    __attribute__((weak));

// What must hold for the argument in a slot; the walk holds the object that it is compared with.
typedef struct {
  int kind, slot;
  PyObject *known;
  long long low, high;
} Test;

// A tensor: its slot, whether its address counts and is part of the key, and which bits of it are as they were.
typedef struct {
  int slot, counts, keyed;
  uint64_t mask, rest;
} Row;

// A factor of a product: an argument, or a number where the slot is negative.
typedef struct {
  int slot;
  double constant;
} Factor;

typedef struct {
  int kind;
  long long number;
} Size;

// Where a launch's value comes from: the address of a tensor and an offset, or a product.
typedef struct {
  int kind, tensor, factors;
  uint64_t offset;
  Factor factor[MOST_FACTORS];
} Source;

// What the senders are kept by: the stream, the place of the scratch, or NULL, and the addresses that they hold.
typedef struct {
  uint64_t stream, addresses[MOST_KEYED];
  PyObject *place;
} Key;

// Senders found before: the dict costs as much as a test of two tensors.
typedef struct {
  Key key;
  PyObject *senders;
} Bucket;

struct Walk {
  PyObject_HEAD
  PyObject *names, *known, *test_rows, *tensor_rows, *writes;  // tuples and bytes; `writes` has bytes for each launch
  PyObject *exchange, *modes, *levels, *grad_mode, *form_rows;  // those without tensors to test may be None
  PyObject *failed, *senders;
  PyObject *unfit;                 // the errors of a value that does not fit its field
  PyObject *result;                // None, a slot, or a tuple of slots
  PyObject *current, *device;      // NULL: the stream is not part of the key
  PyObject *held, *own;            // workspaces by stream, and the key of the legacy one; NULL: it has none
  PyObject *in;                    // the context of workspaces; NULL: it has none
  PyObject *make, *made_of;        // NULL: no tensor is made
  PyObject *halts;                 // of a bound step, else NULL
  PyObject *claim;                 // of the bound step, or the last that was found in `held`
  PyObject *by_size, *size_rows;   // NULL: a call's sizes do not matter; else the walks by their sizes
  ReadTensor read;
  int count, stream_slot, workspace_slot, tests, tensors, keyed, launches, made_counts, sizes;
  const Test *test;
  const Row *row;
  const Form *form;
  const Size *size;
  int counts[MOST_LAUNCHES];
  const Source *source[MOST_LAUNCHES];
  Bucket buckets[BUCKETS];
};

// A call: its arguments and the addresses of its tensors. Behind the first `owned` slots are elements of sequences, and
// the tensor made, which it holds.
typedef struct {
  PyObject **slots;
  int count, owned;
  PyObject *tensors[MOST_TENSORS];
  int64_t first[MOST_TENSORS];           // of their sizes
  uint64_t addresses[MOST_TENSORS + 1];  // the last is that of the tensor made
  Key key;
} Call;

PyObject *call_one(PyObject *callable, PyObject *argument) {
  if (PyObject_Vectorcall != NULL) return PyObject_Vectorcall(callable, &argument, 1, NULL);
  return PyObject_CallFunctionObjArgs(callable, argument, NULL);
}

static PyObject *name_of(const Walk *self, int name) { return PyTuple_GetItem(self->names, name); }

static int is_equal(PyObject *value, PyObject *known) {
  if (value == known) return 1;
  if (Py_TYPE(value) != Py_TYPE(known)) return 0;
  if (!PyFloat_CheckExact(value)) return PyObject_RichCompareBool(value, known, Py_EQ);
  double one = PyFloat_AsDouble(value), other = PyFloat_AsDouble(known);
  return one == other && signbit(one) == signbit(other);
}

static int is_within(PyObject *value, const Test *test) {
  if (!PyLong_CheckExact(value)) return 0;
  int overflow;
  long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
  return !overflow && test->low <= number && number <= test->high;
}

static int is_scale(PyObject *value) {
  if (!PyFloat_CheckExact(value)) return 0;
  double number = PyFloat_AsDouble(value);
  return -SCALE_LIMIT <= number && number <= SCALE_LIMIT && number != 0.0;
}

// The elements of a sequence become slots, which the walk holds: a list may lose them while Python runs.
static int unpack(PyObject *value, const Test *test, Call *call) {
  if ((PyObject *)Py_TYPE(value) != test->known) return 0;
  int is_tuple = PyTuple_CheckExact(value);
  Py_ssize_t size = is_tuple ? PyTuple_Size(value) : PyList_Size(value);
  if (size != test->low || call->count + size > MOST_SLOTS) return 0;
  for (Py_ssize_t i = 0; i < size; i++) {
    call->slots[call->count++] = Py_NewRef(is_tuple ? PyTuple_GetItem(value, i) : PyList_GetItem(value, i));
  }
  return 1;
}

static int holds(const Test *test, Call *call) {
  PyObject *value = call->slots[test->slot];
  switch (test->kind) {
    case EQUAL:
      return is_equal(value, test->known);
    case OF_TYPE:
      return (PyObject *)Py_TYPE(value) == test->known;
    case INTEGER:
      return is_within(value, test);
    case SCALE:
      return is_scale(value);
    default:
      return unpack(value, test, call);
  }
}

static int test_arguments(const Walk *self, Call *call) {
  for (int i = 0; i < self->tests; i++) {
    int held = holds(&self->test[i], call);
    if (held != 1) return held < 0 ? FAILED : UNLIKE;
  }
  return SENT;
}

// Whether a level of forward-mode derivatives is open, in which any tensor may have a tangent.
static int any_tangent(const Walk *self) {
  PyObject *level = PyDict_GetItemWithError(self->levels, name_of(self, LEVEL));
  if (level == NULL) return PyErr_Occurred() ? FAILED : 1;
  long number = PyLong_AsLong(level);
  return number == -1 && PyErr_Occurred() ? FAILED : number >= 0;
}

// Whether a mode of torch intercepts calls, or a tensor may have a tangent; else whether gradients are recorded.
static int read_modes(const Walk *self, int *grad_mode) {
  int any = truth(PyObject_CallNoArgs(self->modes));
  if (!any) any = any_tangent(self);
  *grad_mode = any ? 0 : truth(PyObject_CallNoArgs(self->grad_mode));
  return any < 0 || *grad_mode < 0 ? FAILED : any ? UNLIKE : SENT;
}

// Read the tensors, whose forms must be the known ones.
static int read_tensors(const Walk *self, Call *call) {
  if (self->form == NULL) return SENT;
  int grad_mode, done = read_modes(self, &grad_mode);
  for (int i = 0; i < self->tensors && done == SENT; i++) {
    Tensor tensor;
    call->tensors[i] = call->slots[self->row[i].slot];
    done = read_tensor(self->read, &self->form[i], call->tensors[i], grad_mode, &tensor);
    if (done != SENT) return done;
    call->addresses[i] = address_of(&tensor);
    call->first[i] = tensor.dims ? tensor.shape[0] : 0;
  }
  return done;
}

static int read_word(PyObject *callable, PyObject *argument, uint64_t *word) {
  PyObject *number = call_one(callable, argument);
  if (number == NULL) return FAILED;
  *word = PyLong_AsUnsignedLongLong(number);
  Py_DECREF(number);
  return *word == (uint64_t)-1 && PyErr_Occurred() ? FAILED : SENT;
}

// The tests of addresses; those of the key are put there.
static int test_addresses(const Walk *self, Call *call) {
  int next = 0;
  for (int i = 0; i < self->tensors; i++) {
    const Row *row = &self->row[i];
    if (!row->counts) continue;
    if (!call->addresses[i] || (call->addresses[i] & row->mask) != row->rest) return UNLIKE;
    if (row->keyed) call->key.addresses[next++] = call->addresses[i];
  }
  return SENT;
}

// Whether a claim, (place, buffer, owner, same_stream, ...), still holds; without a buffer it always does.
static int is_held(const Walk *self, PyObject *claim) {
  PyObject *buffer = PyTuple_GetItem(claim, 1), *owner = PyTuple_GetItem(claim, 2);
  PyObject *same_stream = PyTuple_GetItem(claim, 3);
  if (buffer == Py_None) return SENT;
  int held;
  if (same_stream == Py_None) {
    held = truth(PyObject_GetAttr(buffer, name_of(self, OF_LEGACY)));
  } else {
    PyObject *its = PyObject_GetAttr(buffer, name_of(self, OWNER));
    held = its == NULL ? FAILED : its == owner ? truth(PyObject_CallNoArgs(same_stream)) : 0;
    Py_XDECREF(its);
  }
  return held < 0 ? FAILED : held ? SENT : OTHERWISE;
}

// Whether a claim, (..., stream, context), is one of the call's stream, or of any, in the context of the walk.
static int is_for(const Walk *self, PyObject *claim, PyObject *stream) {
  PyObject *of = PyTuple_GetItem(claim, 4), *context = PyTuple_GetItem(claim, 5);
  int is = of == Py_None ? 1 : PyObject_RichCompareBool(of, stream, Py_EQ);
  return is == 1 ? PyObject_RichCompareBool(context, self->in, Py_EQ) : is;
}

// What the workspace of the call's stream says that was claimed of it last: a new reference, to None if nothing was.
static PyObject *find_claim(const Walk *self, const Call *call, PyObject *stream) {
  PyObject *workspace = self->workspace_slot < 0
                            ? PyDict_GetItemWithError(self->held, call->key.stream ? stream : self->own)
                            : call->slots[self->workspace_slot];
  if (workspace == NULL) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
  return PyObject_GetAttr(workspace, name_of(self, CLAIMED));
}

// Take the place of a claim for the call, if it is one of its stream that still holds.
static int take_place(const Walk *self, Call *call, PyObject *stream, PyObject *claim) {
  if (claim == Py_None) return OTHERWISE;
  int held = is_for(self, claim, stream);
  if (held == SENT) held = is_held(self, claim);
  if (held == SENT) call->key.place = Py_NewRef(PyTuple_GetItem(claim, 0));
  return held;
}

// Find the place of the scratch that the stream has claimed, as it had at the call before as a rule; OTHERWISE: Python
// is to claim it.
static int find_place(Walk *self, Call *call) {
  PyObject *stream = PyLong_FromUnsignedLongLong(call->key.stream);
  if (stream == NULL) return FAILED;
  PyObject *claim = Py_NewRef(self->claim == NULL ? Py_None : self->claim);
  int held = take_place(self, call, stream, claim);
  if (held == OTHERWISE) {
    Py_DECREF(claim);
    claim = find_claim(self, call, stream);
    held = claim == NULL ? FAILED : take_place(self, call, stream, claim);
    if (held == SENT && self->workspace_slot < 0) {
      PyObject *old = self->claim;
      self->claim = Py_NewRef(claim);
      Py_XDECREF(old);
    }
  }
  Py_XDECREF(claim);
  Py_DECREF(stream);
  return held;
}

// Whether a bound step may be sent: nothing halts it, and its claim holds.
static int is_ready(const Walk *self) {
  Py_ssize_t reasons = PyList_Size(self->halts);
  return reasons < 0 ? FAILED : reasons ? OTHERWISE : is_held(self, self->claim);
}

static int find_key(Walk *self, Call *call) {
  if (self->halts != NULL) return is_ready(self);
  if (self->stream_slot >= 0 && call->slots[self->stream_slot] != Py_None) return OTHERWISE;
  if (read_word(self->current, self->device, &call->key.stream) == FAILED) return FAILED;
  return self->in == NULL ? SENT : find_place(self, call);
}

// The same key as Python's walk makes it: a tuple.
static PyObject *key_of(const Walk *self, const Key *key) {
  Py_ssize_t next = self->current != NULL, with_place = key->place != NULL;
  PyObject *made = PyTuple_New(next + with_place + self->keyed);
  if (made == NULL) return NULL;
  int failed = next && PyTuple_SetItem(made, 0, PyLong_FromUnsignedLongLong(key->stream));
  if (!failed && with_place) failed = PyTuple_SetItem(made, next++, Py_NewRef(key->place));
  for (int i = 0; i < self->keyed && !failed; i++) {
    failed = PyTuple_SetItem(made, next++, PyLong_FromUnsignedLongLong(key->addresses[i]));
  }
  if (failed || PyErr_Occurred()) Py_CLEAR(made);
  return made;
}

static Bucket *bucket_of(Walk *self, const Key *key) {
  uint64_t mixed = key->stream ^ (uint64_t)(uintptr_t)key->place;
  for (int i = 0; i < MOST_KEYED; i++) mixed = (mixed ^ key->addresses[i]) * 0x9E3779B97F4A7C15u;
  return &self->buckets[mixed >> 56];
}

// The senders of a key, a new reference; NULL without an error: Python is to make them.
static PyObject *find_senders(Walk *self, const Key *key) {
  Bucket *bucket = bucket_of(self, key);
  if (bucket->senders != NULL && !memcmp(&bucket->key, key, sizeof *key)) return Py_NewRef(bucket->senders);
  PyObject *tuple = key_of(self, key);
  if (tuple == NULL) return NULL;
  PyObject *senders = PyDict_GetItemWithError(self->senders, tuple);
  Py_XINCREF(senders);
  Py_DECREF(tuple);
  if (senders == NULL) return NULL;
  Bucket old = *bucket;
  *bucket = (Bucket){*key, Py_NewRef(senders)};
  Py_XINCREF(key->place);
  Py_XDECREF(old.senders);
  Py_XDECREF(old.key.place);
  return senders;
}

// OTHERWISE: it has no memory, as one that a function transform of torch makes; the full path says so.
static int make_tensor(const Walk *self, Call *call) {
  if (self->make == NULL) return SENT;
  Py_ssize_t count = PyTuple_Size(self->made_of);
  PyObject *sources = PyTuple_New(count);
  if (sources == NULL) return FAILED;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyTuple_SetItem(sources, i, Py_NewRef(call->tensors[PyLong_AsSsize_t(PyTuple_GetItem(self->made_of, i))]));
  }
  PyObject *made = PyObject_Call(self->make, sources, NULL);
  Py_DECREF(sources);
  if (made == NULL) return FAILED;
  call->slots[call->count++] = made;
  if (!self->made_counts) return SENT;
  Tensor tensor;
  if (self->read(made, &tensor)) {
    PyErr_Clear();
    return OTHERWISE;
  }
  call->addresses[self->tensors] = address_of(&tensor);
  return call->addresses[self->tensors] ? SENT : OTHERWISE;
}

static int multiply(const Source *source, const Call *call, Value *value) {
  const Factor *first = source->factor;
  if (source->factors == 1 && first->slot >= 0) {
    value->number = call->slots[first->slot];
    return SENT;
  }
  for (int i = 0; i < source->factors; i++) {
    const Factor *factor = &source->factor[i];
    double number = factor->slot < 0 ? factor->constant : PyFloat_AsDouble(call->slots[factor->slot]);
    if (number == -1.0 && PyErr_Occurred()) return FAILED;
    value->product = i ? value->product * number : number;
  }
  return SENT;
}

static int fill_launch(const Walk *self, int launch, const Sender *sender, const Call *call, Parameters *parameters) {
  Value values[MOST_FIELDS];
  for (int i = 0; i < self->counts[launch]; i++) {
    const Source *source = &self->source[launch][i];
    values[i] = (Value){NULL, 0, 0.0};
    if (source->kind == ADDRESS) {
      values[i].address = call->addresses[source->tensor] + source->offset;
    } else if (multiply(source, call, &values[i]) == FAILED) {
      return FAILED;
    }
  }
  return fill(sender, values, parameters) ? FAILED : SENT;
}

// The parameters of all launches, before any is sent.
static int fill_all(const Walk *self, PyObject *senders, const Call *call, Parameters *parameters) {
  for (int i = 0; i < self->launches; i++) {
    PyObject *send = PyTuple_GetItem(senders, i);
    PyObject *sender = send == NULL ? NULL : PyCFunction_GetSelf(send);
    if (sender == NULL) return FAILED;
    if (fill_launch(self, i, (Sender *)sender, call, &parameters[i]) == FAILED) {
      if (!PyErr_ExceptionMatches(self->unfit)) return FAILED;
      PyErr_Clear();  // Python's walk says which value it is
      return OTHERWISE;
    }
  }
  return SENT;
}

static int launch_all(const Walk *self, PyObject *senders, const Call *call) {
  Parameters parameters[MOST_LAUNCHES];
  int filled = fill_all(self, senders, call, parameters);
  if (filled != SENT) return filled;
  for (int i = 0; i < self->launches; i++) {
    int code = launch((Sender *)PyCFunction_GetSelf(PyTuple_GetItem(senders, i)), &parameters[i]);
    if (code && !i) return OTHERWISE;  // Python's walk asks the driver again, and explains its answer
    if (code) {
      PyObject *error = PyObject_CallFunction(self->failed, "i", code);
      if (error != NULL) PyErr_SetObject((PyObject *)Py_TYPE(error), error);
      Py_XDECREF(error);
      return FAILED;  // nothing may be sent twice
    }
  }
  return SENT;
}

static PyObject *item_of(const Call *call, PyObject *slot) { return Py_NewRef(call->slots[PyLong_AsSsize_t(slot)]); }

static PyObject *result_of(const Walk *self, const Call *call) {
  if (self->result == Py_None) return Py_NewRef(Py_None);
  if (!PyTuple_CheckExact(self->result)) return item_of(call, self->result);
  Py_ssize_t count = PyTuple_Size(self->result);
  PyObject *items = PyTuple_New(count);
  for (Py_ssize_t i = 0; i < count && items != NULL; i++) {
    PyTuple_SetItem(items, i, item_of(call, PyTuple_GetItem(self->result, i)));
  }
  return items;
}

static int send_by_key(Walk *self, Call *call, PyObject **result) {
  PyObject *senders = find_senders(self, &call->key);
  if (senders == NULL) return PyErr_Occurred() ? FAILED : OTHERWISE;
  int done = make_tensor(self, call);
  if (done == SENT) done = launch_all(self, senders, call);
  Py_DECREF(senders);
  if (done != SENT) return done;
  *result = result_of(self, call);
  return *result == NULL ? FAILED : SENT;
}

static PyObject *size_at(const Walk *self, int i, const Call *call) {
  long long number = self->size[i].number;
  if (self->size[i].kind == SLOT) return Py_NewRef(call->slots[number]);
  if (self->size[i].kind == CONSTANT) return PyLong_FromLongLong(number);
  return PyLong_FromLongLong(call->first[number]);
}

// The walk of calls of these sizes, a new reference; NULL without an error: Python is to make it.
static Walk *walk_of_size(const Walk *self, const Call *call) {
  PyObject *sizes = PyTuple_New(self->sizes);
  for (int i = 0; i < self->sizes && sizes != NULL; i++) {
    PyObject *size = size_at(self, i, call);
    if (size == NULL) Py_CLEAR(sizes);
    else PyTuple_SetItem(sizes, i, size);
  }
  if (sizes == NULL) return NULL;
  PyObject *found = PyDict_GetItemWithError(self->by_size, sizes);
  Py_XINCREF(found);
  Py_DECREF(sizes);
  return (Walk *)found;
}

static int send_call(Walk *self, Call *call, PyObject **result) {
  int done = test_addresses(self, call);
  if (done == SENT) done = find_key(self, call);
  return done == SENT ? send_by_key(self, call, result) : done;
}

// A call whose sizes choose the launches; what their walk refuses Python launches, by their plan.
static int send_sized(Walk *self, Call *call, PyObject **result) {
  Walk *own = walk_of_size(self, call);
  if (own == NULL) return PyErr_Occurred() ? FAILED : OTHERWISE;
  int done = test_arguments(own, call);
  if (done == SENT) done = send_call(own, call, result);
  Py_DECREF((PyObject *)own);
  return done == UNLIKE ? OTHERWISE : done;
}

int walk(Walk *self, PyObject **slots, PyObject **result) {
  Call call = {.slots = slots, .count = self->count, .owned = self->count};
  int done = test_arguments(self, &call);
  if (done == SENT) done = read_tensors(self, &call);
  if (done == SENT) done = self->by_size ? send_sized(self, &call, result) : send_call(self, &call, result);
  Py_XDECREF(call.key.place);
  while (call.count > call.owned) Py_DECREF(call.slots[--call.count]);
  return done;
}

// The rows of a table, which are bytes, and their number.
static const void *rows_of(PyObject *bytes, size_t size, int *count) {
  *count = bytes == NULL ? 0 : (int)((size_t)PyBytes_Size(bytes) / size);
  return bytes == NULL ? NULL : PyBytes_AsString(bytes);
}

// -1: a Python error is set.
static int set_rows(Walk *self) {
  self->test = rows_of(self->test_rows, sizeof(Test), &self->tests);
  self->row = rows_of(self->tensor_rows, sizeof(Row), &self->tensors);
  self->size = rows_of(self->size_rows, sizeof(Size), &self->sizes);
  for (int i = 0; i < self->tensors; i++) self->keyed += self->row[i].keyed;
  self->launches = (int)PyTuple_Size(self->writes);
  for (int i = 0; i < self->launches; i++) {
    self->source[i] = rows_of(PyTuple_GetItem(self->writes, i), sizeof(Source), &self->counts[i]);
  }
  int forms = self->tensors;
  if (self->form_rows != Py_None) self->form = rows_of(self->form_rows, sizeof(Form), &forms);
  if (forms != self->tensors) PyErr_Format(PyExc_ValueError, "%d forms of %d tensors", forms, self->tensors);
  if (self->exchange != Py_None) self->read = reader_of(self->exchange);
  else if (self->form != NULL || self->made_counts) PyErr_SetString(PyExc_ValueError, "tensors, and no exchange API");
  return PyErr_Occurred() ? -1 : 0;
}

static PyObject *new_walk(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  static char *names[] = {"slots",    "names",   "known",          "tests",   "tensors", "writes",  "forms",
                          "failed",   "senders", "unfit",          "result",  "stream_slot",        "workspace_slot",
                          "current",  "device",  "held",           "own",     "in",      "make",    "made_of",
                          "made_counts",         "halts",          "claim",   "by_size", "sizes",   NULL};
  Walk *self = allocate(type);
  if (self == NULL) return NULL;
  PyObject_GC_UnTrack(self);  // until it holds what it refers to
  self->stream_slot = self->workspace_slot = -1;
  int parsed = PyArg_ParseTupleAndKeywords(
      arguments, keywords, "iO!O!SSO!(OOOOO)OO!OO|iiOOO!OOOO!pO!O!O!S", names, &self->count, &PyTuple_Type,
      &self->names, &PyTuple_Type, &self->known, &self->test_rows, &self->tensor_rows, &PyTuple_Type, &self->writes,
      &self->exchange, &self->modes, &self->levels, &self->grad_mode, &self->form_rows, &self->failed, &PyDict_Type,
      &self->senders, &self->unfit, &self->result, &self->stream_slot, &self->workspace_slot, &self->current,
      &self->device, &PyDict_Type, &self->held, &self->own, &self->in, &self->make, &PyTuple_Type, &self->made_of,
      &self->made_counts, &PyList_Type, &self->halts, &PyTuple_Type, &self->claim, &PyDict_Type, &self->by_size,
      &self->size_rows);
  if (hold_all((PyObject *)self, REFERENCES(Walk, names, size_rows), parsed) == NULL) return NULL;
  if (set_rows(self)) {
    Py_DECREF((PyObject *)self);
    return NULL;
  }
  PyObject_GC_Track(self);
  return (PyObject *)self;
}

// What the buckets hold refers to nothing that could refer to the walk.
static int visit_walk(PyObject *object, visitproc visit, void *arg) {
  return visit_all(object, REFERENCES(Walk, names, size_rows), visit, arg);
}

static int clear_walk(PyObject *object) { return clear_all(object, REFERENCES(Walk, names, size_rows)); }

static void free_walk(PyObject *object) {
  Walk *self = (Walk *)object;
  PyObject_GC_UnTrack(object);
  for (int i = 0; i < BUCKETS; i++) {
    Py_XDECREF(self->buckets[i].key.place);
    Py_XDECREF(self->buckets[i].senders);
  }
  release(object, REFERENCES(Walk, names, size_rows));
}

static PyType_Slot slots[] = {
    {Py_tp_doc, "The launches of calls of one form, by its table."},
    {Py_tp_new, new_walk},
    {Py_tp_dealloc, free_walk},
    {Py_tp_traverse, visit_walk},
    {Py_tp_clear, clear_walk},
    {0, NULL},
};

PyType_Spec walk_spec = {
    "cubin_runtime_accelerator.Walk", sizeof(Walk), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
};
