// One call of a function made for calls alike: the tests of its tensors, their addresses, and the launches.
// What cubin_runtime/attention/fast_path/generated.py writes in Python for it stays the way of all other calls.

#include "sender.h"

#include <string.h>

enum { SLOTS = 256, REFERENCES = 16 };
enum { FAILED = -1, OTHERWISE = 0, SENT = 1, UNLIKE = 2 };

// In the stable ABI from Python 3.12 on, in Python 3.11 the same function; NULL before.
extern PyObject *PyObject_Vectorcall(PyObject *callable, PyObject *const *arguments, size_t count, PyObject *keywords)
    __attribute__((weak));

// The address of a tensor: whether it is needed, is part of the key, and which of its bits are as they were.
typedef struct {
  int needed, keyed;
  uint64_t mask, rest;
} Address;

// Where a launch's value comes from: the address of a tensor and an offset, or a number behind the tensors.
typedef struct {
  Py_ssize_t source;
  uint64_t offset;
} Write;

// What the senders are kept by: the stream, the addresses that they hold, and the place of the scratch, or NULL.
typedef struct {
  uint64_t stream, addresses[MOST_KEYED];
  PyObject *place;
} Key;

// Senders found before: the dict costs as much as a test of two tensors.
typedef struct {
  Key key;
  PyObject *senders;
} Slot;

typedef struct {
  PyObject_HEAD
  PyObject *modes, *levels, *level, *no_level, *check, *data_ptr, *failed, *senders, *of_legacy, *place;
  PyObject *current, *device;       // NULL: the stream is not part of the key
  PyObject *legacy, *place_of;      // NULL: no scratch; `legacy` alone may be None
  PyObject *make, *sources;         // NULL: no tensor is made
  PyTypeObject *sender_type;
  PyObject *guarded;  // what `check` calls, borrowed from it, or NULL
  Py_ssize_t tensors, numbers, keyed, launches;
  Address addresses[MOST_TENSORS + 1];  // the last is that of the tensor made
  Py_ssize_t counts[MOST_LAUNCHES];
  Write writes[MOST_LAUNCHES][MOST_FIELDS];
  Slot slots[SLOTS];
} Step;

static PyObject *call_one(PyObject *callable, PyObject *argument) {
  if (PyObject_Vectorcall != NULL) return PyObject_Vectorcall(callable, &argument, 1, NULL);
  return PyObject_CallFunctionObjArgs(callable, argument, NULL);
}

// Whether a level of forward-mode derivatives is open, in which any tensor may have a tangent.
static int any_tangent(const Step *self) {
  PyObject *level = PyDict_GetItemWithError(self->levels, self->level);
  if (level == self->no_level) return 0;  // as Python has one object of each small number
  if (level == NULL) return PyErr_Occurred() ? -1 : 1;
  long number = PyLong_AsLong(level);
  return number == -1 && PyErr_Occurred() ? -1 : number >= 0;
}

// The tests of the tensors' forms, by torch's own guard, outside any dispatch mode and level of derivatives.
static int test_forms(const Step *self, PyObject *const *given) {
  PyObject *modes = PyObject_CallNoArgs(self->modes);
  if (modes == NULL) return FAILED;
  int any = PyObject_IsTrue(modes);
  Py_DECREF(modes);
  if (!any) any = any_tangent(self);
  if (any) return any < 0 ? FAILED : UNLIKE;
  PyObject *tensors = PyTuple_New(self->tensors);
  if (tensors == NULL) return FAILED;
  for (Py_ssize_t i = 0; i < self->tensors; i++) PyTuple_SetItem(tensors, i, Py_NewRef(given[i]));
  PyObject *found = self->guarded ? alike(self->guarded, tensors) : PyObject_Call(self->check, tensors, NULL);
  Py_DECREF(tensors);
  if (found == NULL) return FAILED;
  int alike = found == Py_True;
  Py_DECREF(found);
  return alike ? SENT : UNLIKE;
}

static int read_word(PyObject *callable, PyObject *argument, uint64_t *word) {
  PyObject *number = call_one(callable, argument);
  if (number == NULL) return FAILED;
  *word = PyLong_AsUnsignedLongLong(number);
  Py_DECREF(number);
  return *word == (uint64_t)-1 && PyErr_Occurred() ? FAILED : SENT;
}

static int read_addresses(const Step *self, PyObject *const *given, uint64_t *addresses, Key *key) {
  Py_ssize_t next = 0;
  for (Py_ssize_t i = 0; i < self->tensors; i++) {
    const Address *address = &self->addresses[i];
    if (!address->needed) continue;
    if (read_word(self->data_ptr, given[i], &addresses[i]) == FAILED) return FAILED;
    if (address->keyed) key->addresses[next++] = addresses[i];
    if (!addresses[i] || (addresses[i] & address->mask) != address->rest) return UNLIKE;
  }
  return SENT;
}

// Where the scratch of a launch on the stream is: a new reference, to None if Python is to say, or NULL.
static PyObject *find_place(const Step *self, uint64_t stream) {
  if (!stream && self->legacy != Py_None) {
    PyObject *own = PyObject_GetAttr(self->legacy, self->of_legacy);
    if (own == NULL) return NULL;
    int is_own = PyObject_IsTrue(own);
    Py_DECREF(own);
    if (is_own < 0) return NULL;
    return is_own ? PyObject_GetAttr(self->legacy, self->place) : Py_NewRef(Py_None);
  }
  PyObject *handle = PyLong_FromUnsignedLongLong(stream);
  if (handle == NULL) return NULL;
  PyObject *place = call_one(self->place_of, handle);
  Py_DECREF(handle);
  return place;
}

static int find_key(const Step *self, PyObject *const *given, uint64_t *addresses, Key *key) {
  int found = read_addresses(self, given, addresses, key);
  if (found != SENT || self->current == NULL) return found;
  if (read_word(self->current, self->device, &key->stream) == FAILED) return FAILED;
  if (self->place_of == NULL) return SENT;
  key->place = find_place(self, key->stream);
  if (key->place == NULL) return FAILED;
  return key->place == Py_None ? OTHERWISE : SENT;
}

// The same key as Python's lines make it: a tuple.
static PyObject *key_of(const Step *self, const Key *key) {
  Py_ssize_t next = self->current != NULL, with_place = key->place != NULL;
  PyObject *made = PyTuple_New(next + self->keyed + with_place);
  if (made == NULL) return NULL;
  int failed = next && PyTuple_SetItem(made, 0, PyLong_FromUnsignedLongLong(key->stream));
  for (Py_ssize_t i = 0; i < self->keyed && !failed; i++) {
    failed = PyTuple_SetItem(made, next++, PyLong_FromUnsignedLongLong(key->addresses[i]));
  }
  if (!failed && with_place) failed = PyTuple_SetItem(made, next, Py_NewRef(key->place));
  if (failed || PyErr_Occurred()) Py_CLEAR(made);
  return made;
}

static Slot *slot_of(Step *self, const Key *key) {
  uint64_t mixed = key->stream ^ (uint64_t)(uintptr_t)key->place;
  for (int i = 0; i < MOST_KEYED; i++) mixed = (mixed ^ key->addresses[i]) * 0x9E3779B97F4A7C15u;
  return &self->slots[mixed >> 56];
}

// The senders of a key, a new reference; NULL without an error: Python's lines are to make them.
static PyObject *find_senders(Step *self, const Key *key) {
  Slot *slot = slot_of(self, key);
  if (slot->senders != NULL && !memcmp(&slot->key, key, sizeof *key)) return Py_NewRef(slot->senders);
  PyObject *tuple = key_of(self, key);
  if (tuple == NULL) return NULL;
  PyObject *senders = PyDict_GetItemWithError(self->senders, tuple);
  Py_XINCREF(senders);
  Py_DECREF(tuple);
  if (senders == NULL) return NULL;
  Slot old = *slot;
  *slot = (Slot){*key, Py_NewRef(senders)};
  Py_XINCREF(key->place);
  Py_XDECREF(old.senders);
  Py_XDECREF(old.key.place);
  return senders;
}

static PyObject *make_tensor(const Step *self, PyObject *const *given) {
  Py_ssize_t count = PyTuple_Size(self->sources);
  PyObject *sources = PyTuple_New(count);
  if (sources == NULL) return NULL;
  for (Py_ssize_t i = 0; i < count; i++) {
    Py_ssize_t number = PyLong_AsSsize_t(PyTuple_GetItem(self->sources, i));
    PyTuple_SetItem(sources, i, Py_NewRef(given[number]));
  }
  PyObject *made = PyObject_Call(self->make, sources, NULL);
  Py_DECREF(sources);
  return made;
}

static int is_of_value(void) {
  return PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_ValueError) ||
         PyErr_ExceptionMatches(PyExc_OverflowError);
}

// The parameters of all launches, before any is sent.
static int fill_all(const Step *self, PyObject *senders, PyObject *const *given, const uint64_t *addresses,
                    Parameters *parameters) {
  Value values[MOST_FIELDS];
  Py_ssize_t past = self->tensors + (self->make != NULL);
  for (Py_ssize_t i = 0; i < self->launches; i++) {
    PyObject *send = PyTuple_GetItem(senders, i);
    PyObject *sender = send == NULL ? NULL : PyCFunction_GetSelf(send);
    if (sender == NULL) return FAILED;
    if (Py_TYPE(sender) != self->sender_type || ((Sender *)sender)->count != self->counts[i]) return OTHERWISE;
    for (Py_ssize_t j = 0; j < self->counts[i]; j++) {
      const Write *write = &self->writes[i][j];
      values[j] = write->source < past ? (Value){NULL, addresses[write->source] + write->offset}
                                       : (Value){given[self->tensors + write->source - past], 0};
    }
    if (fill((Sender *)sender, values, &parameters[i])) {
      if (!is_of_value()) return FAILED;
      PyErr_Clear();  // Python's own lines say which value it is
      return OTHERWISE;
    }
  }
  return SENT;
}

static int fail(const Step *self, int code) {
  PyObject *error = PyObject_CallFunction(self->failed, "i", code);
  if (error == NULL) return FAILED;
  PyErr_SetObject((PyObject *)Py_TYPE(error), error);
  Py_DECREF(error);
  return FAILED;
}

static int launch_all(const Step *self, PyObject *senders, PyObject *const *given, const uint64_t *addresses) {
  Parameters parameters[MOST_LAUNCHES];
  int filled = fill_all(self, senders, given, addresses, parameters);
  if (filled != SENT) return filled;
  for (Py_ssize_t i = 0; i < self->launches; i++) {
    int code;
    if (launch((Sender *)PyCFunction_GetSelf(PyTuple_GetItem(senders, i)), &parameters[i], &code)) return FAILED;
    // Python's lines ask the driver for the first again, and explain its answer; nothing may be sent twice.
    if (code) return i ? fail(self, code) : OTHERWISE;
  }
  return SENT;
}

static int send_by_key(Step *self, const Key *key, PyObject *const *given, uint64_t *addresses, PyObject **made) {
  PyObject *senders = find_senders(self, key);
  if (senders == NULL) return PyErr_Occurred() ? FAILED : OTHERWISE;
  int found = SENT;
  if (self->make != NULL) {
    *made = make_tensor(self, given);
    found = *made == NULL ? FAILED : SENT;
    if (found == SENT) found = read_word(self->data_ptr, *made, &addresses[self->tensors]);
  }
  if (found == SENT) found = launch_all(self, senders, given, addresses);
  Py_DECREF(senders);
  return found;
}

static PyObject *send(PyObject *object, PyObject *const *given, Py_ssize_t count) {
  Step *self = (Step *)object;
  if (count != self->tensors + self->numbers) {
    return PyErr_Format(PyExc_TypeError, "send: %zd arguments, expected %zd", count, self->tensors + self->numbers);
  }
  uint64_t addresses[MOST_TENSORS + 1];
  Key key = {0};
  PyObject *made = NULL;
  int found = test_forms(self, given);
  if (found == SENT) found = find_key(self, given, addresses, &key);
  if (found == SENT) found = send_by_key(self, &key, given, addresses, &made);
  Py_XDECREF(key.place);
  if (found == SENT) return made != NULL ? made : Py_NewRef(Py_True);
  Py_XDECREF(made);
  return found == FAILED ? NULL : Py_NewRef(found == UNLIKE ? Py_None : Py_False);
}

static int refuse(const char *what) {
  PyErr_Format(PyExc_ValueError, "%s: not what was expected", what);
  return -1;
}

static int set_addresses(Step *self, PyObject *addresses) {
  self->tensors = PyTuple_Size(addresses);
  if (self->tensors > MOST_TENSORS) return refuse("addresses");
  for (Py_ssize_t i = 0; i < self->tensors; i++) {
    PyObject *item = PyTuple_GetItem(addresses, i);
    if (item == Py_None) continue;
    unsigned long long mask, rest;
    int keyed;
    if (!PyArg_ParseTuple(item, "pKK", &keyed, &mask, &rest)) return -1;
    self->addresses[i] = (Address){1, keyed, mask, rest};
    self->keyed += keyed;
  }
  return self->keyed > MOST_KEYED ? refuse("addresses") : 0;
}

static int set_writes(Step *self, PyObject *writes) {
  Py_ssize_t past = self->tensors + (self->make != NULL);
  self->launches = PyTuple_Size(writes);
  if (self->launches > MOST_LAUNCHES) return refuse("writes");
  for (Py_ssize_t i = 0; i < self->launches; i++) {
    PyObject *of_launch = PyTuple_GetItem(writes, i);
    self->counts[i] = PyTuple_Size(of_launch);
    if (self->counts[i] < 0) return -1;
    if (self->counts[i] > MOST_FIELDS) return refuse("writes");
    for (Py_ssize_t j = 0; j < self->counts[i]; j++) {
      Py_ssize_t source;
      unsigned long long offset;
      if (!PyArg_ParseTuple(PyTuple_GetItem(of_launch, j), "nK", &source, &offset)) return -1;
      if (source < 0 || source >= past + self->numbers) return refuse("writes");
      if (source < past && !self->addresses[source].needed) return refuse("writes");
      self->writes[i][j] = (Write){source, offset};
    }
  }
  return 0;
}

static int set_made(Step *self, PyObject *made) {
  if (made == Py_None) return 0;
  PyObject *make, *sources;
  if (!PyArg_ParseTuple(made, "OO!", &make, &PyTuple_Type, &sources)) return -1;
  for (Py_ssize_t i = 0; i < PyTuple_Size(sources); i++) {
    Py_ssize_t number = PyLong_AsSsize_t(PyTuple_GetItem(sources, i));
    if (number == -1 && PyErr_Occurred()) return -1;
    if (number < 0 || number >= self->tensors) return refuse("made");
  }
  self->make = Py_NewRef(make);
  self->sources = Py_NewRef(sources);
  self->addresses[self->tensors].needed = 1;
  return 0;
}

static int set_pair(PyObject *pair, PyObject **first, PyObject **second) {
  if (pair == Py_None) return 0;
  PyObject *one, *other;
  if (!PyArg_ParseTuple(pair, "OO", &one, &other)) return -1;
  *first = Py_NewRef(one);
  *second = Py_NewRef(other);
  return 0;
}

static int set_all(Step *self, PyTypeObject *type, PyObject *addresses, PyObject *writes, PyObject *stream,
                   PyObject *scratch, PyObject *made) {
  PyObject *module = PyType_GetModule(type);
  self->level = PyUnicode_InternFromString("_current_level");
  self->no_level = PyLong_FromLong(-1);
  self->sender_type = module == NULL ? NULL : (PyTypeObject *)PyObject_GetAttrString(module, "Sender");
  self->of_legacy = PyUnicode_InternFromString("of_legacy");
  self->place = PyUnicode_InternFromString("place");
  if (self->sender_type == NULL || self->level == NULL || self->no_level == NULL) return -1;
  if (self->of_legacy == NULL || self->place == NULL) return -1;
  if (set_pair(stream, &self->current, &self->device) || set_pair(scratch, &self->legacy, &self->place_of)) return -1;
  if (self->place_of != NULL && self->current == NULL) return refuse("scratch");
  return set_addresses(self, addresses) || set_made(self, made) || set_writes(self, writes) ? -1 : 0;
}

static PyObject *new_step(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  static char *names[] = {"modes",   "levels", "check",   "data_ptr", "failed", "addresses", "senders",
                          "writes",  "numbers", "stream", "scratch",  "made",   NULL};
  PyObject *modes, *levels, *check, *data_ptr, *failed, *addresses, *senders, *writes;
  PyObject *stream = Py_None, *scratch = Py_None, *made = Py_None;
  Py_ssize_t numbers;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO!OOOO!O!O!n|OOO", names, &modes, &PyDict_Type, &levels, &check, &data_ptr, &failed,
                                   &PyTuple_Type, &addresses, &PyDict_Type, &senders, &PyTuple_Type, &writes, &numbers,
                                   &stream, &scratch, &made)) {
    return NULL;
  }
  allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  Step *self = (Step *)allocate(type, 0);
  if (self == NULL) return NULL;
  self->modes = Py_NewRef(modes);
  self->levels = Py_NewRef(levels);
  self->check = Py_NewRef(check);
  self->guarded = guarded_by(check);
  self->data_ptr = Py_NewRef(data_ptr);
  self->failed = Py_NewRef(failed);
  self->senders = Py_NewRef(senders);
  self->numbers = numbers;
  if (set_all(self, type, addresses, writes, stream, scratch, made)) {
    Py_DECREF((PyObject *)self);
    return NULL;
  }
  return (PyObject *)self;
}

// All that a step refers to.
static void each_reference(Step *self, PyObject **found[REFERENCES]) {
  PyObject **all[REFERENCES] = {&self->modes,   &self->levels,    &self->level, &self->check,   &self->data_ptr,
                                &self->failed,  &self->no_level,
                                &self->senders, &self->of_legacy, &self->place, &self->current, &self->device,
                                &self->legacy,  &self->place_of,  &self->make,  &self->sources};
  memcpy(found, all, sizeof all);
}

static int visit_step(PyObject *object, visitproc visit, void *arg) {
  PyObject **references[REFERENCES];
  each_reference((Step *)object, references);
  for (int i = 0; i < REFERENCES; i++) Py_VISIT(*references[i]);
  Py_VISIT((PyObject *)((Step *)object)->sender_type);
  for (int i = 0; i < SLOTS; i++) {
    Py_VISIT(((Step *)object)->slots[i].key.place);
    Py_VISIT(((Step *)object)->slots[i].senders);
  }
  Py_VISIT(Py_TYPE(object));
  return 0;
}

static int clear_step(PyObject *object) {
  PyObject **references[REFERENCES];
  each_reference((Step *)object, references);
  for (int i = 0; i < REFERENCES; i++) Py_CLEAR(*references[i]);
  Py_CLEAR(((Step *)object)->sender_type);
  for (int i = 0; i < SLOTS; i++) {
    Py_CLEAR(((Step *)object)->slots[i].key.place);
    Py_CLEAR(((Step *)object)->slots[i].senders);
  }
  return 0;
}

static void free_step(PyObject *object) {
  PyTypeObject *type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  clear_step(object);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(object);
  Py_DECREF((PyObject *)type);
}

static PyMethodDef methods[] = {
    {"send", (PyCFunction)(void (*)(void))send, METH_FASTCALL,
     "send(*tensors, *numbers): True, or the tensor made, if the launches were; None: a tensor is unlike the known ones; "
     "False: Python's lines are to do it."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The launches of calls alike, from their tensors."},
    {Py_tp_new, new_step},
    {Py_tp_dealloc, free_step},
    {Py_tp_traverse, visit_step},
    {Py_tp_clear, clear_step},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec step_spec = {
    "cubin_runtime_accelerator.Step", sizeof(Step), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
};
