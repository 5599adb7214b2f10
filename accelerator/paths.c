// The paths of one operator, as cubin_runtime/attention/fast_path/operator_function.py tries them in Python: a call's
// arguments are put in the order of the parameters, and each path is asked in turn, in C where it has a walk.

#include "sender.h"

#include <string.h>

typedef struct {
  PyObject_HEAD
  PyObject *names, *defaults;      // of all parameters, in order; `missing` for those that have no default
  PyObject *missing, *miss, *walk_type, *otherwise;
  PyObject *entries, *walks;       // tuples: the paths, and the walk of each, or None
  PyObject *name[MOST_SLOTS], *fallback[MOST_SLOTS];  // of each parameter, held by the tuples
  Py_ssize_t count, first, by_position;  // calls leave out those before `first`
} Paths;

// The arguments of a call, borrowed.
typedef struct {
  PyObject *const *values;  // by position, then by name
  Py_ssize_t count, named;
  PyObject *names[MOST_SLOTS];
} Given;

// The parameter that a keyword names, or -1: names of programs and of parameters are interned, as a rule, and in order,
// so that the one behind the last is tried first.
static Py_ssize_t index_of(const Paths *self, PyObject *name, Py_ssize_t next) {
  for (Py_ssize_t i = next; i < self->count; i++) {
    if (self->name[i] == name) return i;
  }
  for (Py_ssize_t i = self->first; i < self->count; i++) {
    if (PyUnicode_Compare(self->name[i], name) == 0) return i;
  }
  return -1;
}

// The arguments in the order of the parameters. 0: they are not as the operator takes them.
static int bind(const Paths *self, const Given *given, PyObject **slots) {
  if (given->count > self->by_position) return 0;
  memset(slots, 0, (size_t)self->count * sizeof *slots);
  memcpy(slots + self->first, given->values, (size_t)given->count * sizeof *slots);
  for (Py_ssize_t i = 0, next = self->first; i < given->named; i++, next++) {
    next = index_of(self, given->names[i], next);
    if (next < 0 || slots[next] != NULL) return 0;
    slots[next] = given->values[given->count + i];
  }
  for (Py_ssize_t i = 0; i < self->count; i++) {
    if (slots[i] != NULL) continue;
    slots[i] = self->fallback[i];
    if (slots[i] == self->missing) return 0;
  }
  return 1;
}

static PyObject *in_python(PyObject *path, Py_ssize_t count, PyObject **slots) {
  PyObject *arguments = tuple_of(slots, count);
  PyObject *result = arguments == NULL ? NULL : call_one(path, arguments);
  Py_XDECREF(arguments);
  return result;
}

// What a path gives for a call: a new reference, to `miss` if it does not send it, or NULL.
static PyObject *ask(const Paths *self, PyObject *path, PyObject *its_walk, PyObject **slots) {
  if ((PyObject *)Py_TYPE(its_walk) == self->walk_type) {
    PyObject *result = NULL;
    int done = walk((Walk *)its_walk, slots, &result);
    if (done == SENT) return result;
    if (done == FAILED) return NULL;
    if (done == UNLIKE) return Py_NewRef(self->miss);
  }
  return in_python(path, self->count, slots);
}

static int set_entries(PyObject *object, PyObject *entries, void *unused) {
  Paths *self = (Paths *)object;
  if (entries == NULL || !PyTuple_CheckExact(entries)) {
    PyErr_SetString(PyExc_TypeError, "entries: expected a tuple");
    return -1;
  }
  Py_ssize_t count = PyTuple_Size(entries);
  PyObject *walks = PyTuple_New(count);
  if (walks == NULL) return -1;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *its = PyObject_GetAttrString(PyTuple_GetItem(entries, i), "walk");
    if (its == NULL) {
      Py_DECREF(walks);
      return -1;
    }
    PyTuple_SetItem(walks, i, its);
  }
  PyObject *old_entries = self->entries, *old_walks = self->walks;
  self->entries = Py_NewRef(entries);
  self->walks = walks;
  Py_XDECREF(old_entries);
  Py_XDECREF(old_walks);
  return 0;
}

static PyObject *get_entries(PyObject *object, void *unused) { return Py_NewRef(((Paths *)object)->entries); }

// The last path used is asked first; unless another thread changed them.
static int promote(Paths *self, PyObject *entries, Py_ssize_t used) {
  if (!used || self->entries != entries) return 0;
  Py_ssize_t count = PyTuple_Size(entries);
  PyObject *ordered = PyTuple_New(count);
  if (ordered == NULL) return -1;
  PyTuple_SetItem(ordered, 0, Py_NewRef(PyTuple_GetItem(entries, used)));
  for (Py_ssize_t i = 0, next = 1; i < count; i++) {
    if (i != used) PyTuple_SetItem(ordered, next++, Py_NewRef(PyTuple_GetItem(entries, i)));
  }
  int failed = set_entries((PyObject *)self, ordered, NULL);
  Py_DECREF(ordered);
  return failed;
}

static PyObject *try_all(Paths *self, PyObject **slots) {
  PyObject *entries = Py_NewRef(self->entries), *walks = Py_NewRef(self->walks), *result = Py_NewRef(self->miss);
  for (Py_ssize_t i = 0; i < PyTuple_Size(entries) && result == self->miss; i++) {
    Py_DECREF(result);
    result = ask(self, PyTuple_GetItem(entries, i), PyTuple_GetItem(walks, i), slots);
    if (result != NULL && result != self->miss && promote(self, entries, i)) Py_CLEAR(result);
  }
  Py_DECREF(entries);
  Py_DECREF(walks);
  return result;
}

static PyObject *call_otherwise(const Paths *self, PyObject *const *given, Py_ssize_t count, PyObject *keywords) {
  PyObject *arguments = tuple_of(given, count), *options = PyDict_New(), *result = NULL;
  int failed = arguments == NULL || options == NULL;
  Py_ssize_t named = keywords == NULL ? 0 : PyTuple_Size(keywords);
  for (Py_ssize_t i = 0; i < named && !failed; i++) {
    failed = PyDict_SetItem(options, PyTuple_GetItem(keywords, i), given[count + i]);
  }
  if (!failed) result = PyObject_Call(self->otherwise, arguments, options);
  Py_XDECREF(arguments);
  Py_XDECREF(options);
  return result;
}

static PyObject *send_given(Paths *self, const Given *given) {
  PyObject *slots[MOST_SLOTS + 1];
  return bind(self, given, slots) ? try_all(self, slots) : Py_NewRef(self->miss);
}

static PyObject *send(PyObject *object, PyObject *const *values, Py_ssize_t count, PyObject *keywords) {
  Paths *self = (Paths *)object;
  Given given;
  given.values = values;
  given.count = count;
  given.named = keywords == NULL ? 0 : PyTuple_Size(keywords);
  int fits = given.count + given.named <= MOST_SLOTS;
  for (Py_ssize_t i = 0; fits && i < given.named; i++) given.names[i] = PyTuple_GetItem(keywords, i);
  PyObject *result = fits ? send_given(self, &given) : Py_NewRef(self->miss);
  if (result != self->miss || self->otherwise == NULL) return result;
  Py_DECREF(result);
  return call_otherwise(self, values, count, keywords);
}

static PyObject *call(PyObject *object, PyObject *const *both, Py_ssize_t count) {
  Paths *self = (Paths *)object;
  if (count != 2 || !PyTuple_Check(both[0]) || !PyDict_Check(both[1])) {
    return PyErr_Format(PyExc_TypeError, "call: expected a tuple and a dict");
  }
  PyObject *values[MOST_SLOTS];
  Given given;
  given.values = values;
  given.count = PyTuple_Size(both[0]);
  given.named = PyDict_Size(both[1]);
  if (given.count + given.named > MOST_SLOTS) return Py_NewRef(self->miss);
  for (Py_ssize_t i = 0; i < given.count; i++) values[i] = PyTuple_GetItem(both[0], i);
  for (Py_ssize_t at = 0, i = 0; PyDict_Next(both[1], &at, &given.names[i], &values[given.count + i]);) i++;
  return send_given(self, &given);
}

static PyObject *new_paths(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  static char *names[] = {"names", "defaults", "missing", "first", "by_position", "miss", "otherwise", NULL};
  Paths *self = allocate(type);
  if (self == NULL) return NULL;
  PyObject_GC_UnTrack(self);  // until it holds what it refers to
  int parsed = PyArg_ParseTupleAndKeywords(arguments, keywords, "O!O!OnnO|O", names, &PyTuple_Type, &self->names,
                                           &PyTuple_Type, &self->defaults, &self->missing, &self->first,
                                           &self->by_position, &self->miss, &self->otherwise);
  if (hold_all((PyObject *)self, REFERENCES(Paths, names, walks), parsed) == NULL) return NULL;
  self->count = PyTuple_Size(self->names);
  self->entries = PyTuple_New(0);
  self->walks = PyTuple_New(0);
  PyObject *module = PyType_GetModule(type);
  self->walk_type = module == NULL ? NULL : PyObject_GetAttrString(module, "Walk");
  int fits = self->count <= MOST_SLOTS && self->count == PyTuple_Size(self->defaults);
  if (!fits) PyErr_SetString(PyExc_ValueError, "Paths: too many names, or another number of defaults");
  if (!fits || self->entries == NULL || self->walks == NULL || self->walk_type == NULL) {
    Py_DECREF(self);
    return NULL;
  }
  for (Py_ssize_t i = 0; i < self->count; i++) {
    self->name[i] = PyTuple_GetItem(self->names, i);
    self->fallback[i] = PyTuple_GetItem(self->defaults, i);
  }
  PyObject_GC_Track(self);
  return (PyObject *)self;
}

static int visit_paths(PyObject *object, visitproc visit, void *arg) {
  return visit_all(object, REFERENCES(Paths, names, walks), visit, arg);
}

// Without the others a call that comes all the same would have no names to bind by.
static int clear_paths(PyObject *object) { return clear_all(object, REFERENCES(Paths, otherwise, walks)); }

static void free_paths(PyObject *object) {
  PyObject_GC_UnTrack(object);
  release(object, REFERENCES(Paths, names, walks));
}

static PyMethodDef methods[] = {
    {"send", (PyCFunction)(void (*)(void))send, METH_FASTCALL | METH_KEYWORDS,
     "send(*arguments, **options): what the path of such calls gives, or else `otherwise`, or `miss`."},
    {"call", (PyCFunction)(void (*)(void))call, METH_FASTCALL,
     "call(arguments, options): what the path of such calls gives, or `miss`."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"entries", get_entries, set_entries, "The paths, the last used first.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The paths of one operator."},
    {Py_tp_new, new_paths},
    {Py_tp_dealloc, free_paths},
    {Py_tp_traverse, visit_paths},
    {Py_tp_clear, clear_paths},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, NULL},
};

PyType_Spec paths_spec = {
    "cubin_runtime_accelerator.Paths", sizeof(Paths), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
};
