// One launch, as cubin_runtime/launch/senders.py makes it by ctypes; the two are tested alike.

#include "sender.h"

#include <math.h>
#include <string.h>

static int write_integer(unsigned char *at, char code, PyObject *value) {
  long long word = PyLong_AsLongLong(value);
  if (word == -1 && PyErr_Occurred()) return -1;
  if ((code == 'i' && word != (int32_t)word) || (code == 'I' && word != (uint32_t)word)) {
    PyErr_SetString(PyExc_OverflowError, "the number does not fit its field");
    return -1;
  }
  memcpy(at, &word, code == 'q' ? 8 : 4);  // little-endian, as the device
  return 0;
}

static int write_float(unsigned char *at, const Value *value) {
  double number = value->number == NULL ? value->product : PyFloat_AsDouble(value->number);
  if (number == -1.0 && PyErr_Occurred()) return -1;
  float word = (float)number;
  if (isinf(word) && !isinf(number)) {
    PyErr_SetString(PyExc_OverflowError, "the number does not fit float32");
    return -1;
  }
  memcpy(at, &word, 4);
  return 0;
}

static int write_address(const Sender *self, unsigned char *at, char code, const Value *value) {
  uint64_t address = value->number == NULL ? value->address : PyLong_AsUnsignedLongLong(value->number);
  if (address == (uint64_t)-1 && PyErr_Occurred()) return -1;
  if (code != MAP) {
    memcpy(at, &address, 8);
    return 0;
  }
  int refused = self->replace(at, (void *)(uintptr_t)address);
  if (refused) PyErr_Format(PyExc_ValueError, "cuTensorMapReplaceAddress returned %d", refused);
  return refused ? -1 : 0;
}

static int write_value(const Sender *self, unsigned char *at, char code, const Value *value) {
  if (code == 'f') return write_float(at, value);
  if (code == 'Q' || code == MAP) return write_address(self, at, code, value);
  if (value->number != NULL) return write_integer(at, code, value->number);
  PyErr_Format(PyExc_TypeError, "an address for a field of format %c", code);
  return -1;
}

int fill(const Sender *self, const Value *values, Parameters *parameters) {
  memcpy(parameters->bytes, self->bytes, (size_t)self->size);
  for (Py_ssize_t i = 0; i < self->count; i++) {
    if (write_value(self, parameters->bytes + self->field[i].offset, self->field[i].code, &values[i])) return -1;
  }
  return 0;
}

int launch(const Sender *self, Parameters *parameters) {
  note((Ring *)self->ring, self->launch, self->stream, (const char *)parameters->bytes, self->size);
  void *pointers[1] = {parameters->bytes};
  int code;
  Py_BEGIN_ALLOW_THREADS  // a full queue waits
  code = self->call(self->config, self->function, pointers, NULL);
  Py_END_ALLOW_THREADS
  return code;
}

static PyObject *send(PyObject *object, PyObject *const *given, Py_ssize_t count) {
  const Sender *self = (const Sender *)object;
  if (count != self->count) {
    return PyErr_Format(PyExc_TypeError, "send: %zd values, expected %zd", count, self->count);
  }
  Value values[MOST_FIELDS];
  for (Py_ssize_t i = 0; i < count; i++) values[i] = (Value){given[i], 0, 0.0};
  Parameters parameters;
  return fill(self, values, &parameters) ? NULL : PyLong_FromLong(launch(self, &parameters));
}

static PyObject *new_sender(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  static char *names[] = {"call",   "replace", "config", "function", "parameters", "fields",
                          "launch", "stream",  "ring",   "kept",     NULL};
  Sender *self = allocate(type);
  if (self == NULL) return NULL;
  unsigned long long call, replace, config, function;
  int parsed = PyArg_ParseTupleAndKeywords(
      arguments, keywords, "KKKKSSOOOO", names, &call, &replace, &config, &function, &self->parameters, &self->fields,
      &self->launch, &self->stream, &self->ring, &self->kept);
  if (parsed && !is_ring(self->ring)) parsed = PyErr_Format(PyExc_TypeError, "ring: expected a Ring") != NULL;
  if (hold_all((PyObject *)self, REFERENCES(Sender, parameters, kept), parsed) == NULL) return NULL;
  self->call = (LaunchKernelEx)(uintptr_t)call;
  self->replace = (ReplaceAddress)(uintptr_t)replace;
  self->config = (const void *)(uintptr_t)config;
  self->function = (void *)(uintptr_t)function;
  self->size = PyBytes_Size(self->parameters);
  self->count = PyBytes_Size(self->fields) / (Py_ssize_t)sizeof(Field);
  self->bytes = PyBytes_AsString(self->parameters);
  self->field = (const Field *)PyBytes_AsString(self->fields);
  return (PyObject *)self;
}

static void free_sender(PyObject *object) { release(object, REFERENCES(Sender, parameters, kept)); }

static PyMethodDef methods[] = {
    {"send", (PyCFunction)(void (*)(void))send, METH_FASTCALL, "send(*values): launch; the driver's CUresult."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "One launch of a plan, of which some parameters are given at each call."},
    {Py_tp_new, new_sender},
    {Py_tp_dealloc, free_sender},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec sender_spec = {"cubin_runtime_accelerator.Sender", sizeof(Sender), 0, Py_TPFLAGS_DEFAULT, slots};

typedef struct {
  int (*capturing)(void *stream, int *status);
  int (*identify)(void *stream, unsigned long long *number);
  void *stream;
  unsigned long long number;
} StreamQuery;

// In this order: to ask a capturing stream for its number would spoil the capture. The driver may wait.
static PyObject *is_same_stream(PyObject *bytes, PyObject *unused) {
  const StreamQuery *query = (const StreamQuery *)PyBytes_AsString(bytes);
  int status = 0, is_same;
  unsigned long long number = 0;
  Py_BEGIN_ALLOW_THREADS
  is_same = !query->capturing(query->stream, &status) && !status && !query->identify(query->stream, &number);
  Py_END_ALLOW_THREADS
  return PyBool_FromLong(is_same && number == query->number);
}

PyObject *same_stream(PyObject *module, PyObject *query) {
  static PyMethodDef method = {"is_same_stream", is_same_stream, METH_NOARGS, "Whether the stream is still the same."};
  if (PyBytes_Check(query) && PyBytes_Size(query) == sizeof(StreamQuery)) return PyCFunction_NewEx(&method, query, NULL);
  return PyErr_Format(PyExc_TypeError, "same_stream: expected %zu bytes", sizeof(StreamQuery));
}
