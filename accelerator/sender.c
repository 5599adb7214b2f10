// One launch, as cubin_runtime/launch/senders.py makes it by ctypes; the two are tested alike.

#include "sender.h"

#include <math.h>
#include <string.h>

static int size_of(char code) {
  switch (code) {
    case 'Q':
    case 'q':
      return 8;
    case 'i':
    case 'I':
    case 'f':
      return 4;
    default:
      return 0;
  }
}

static int write_integer(unsigned char *at, char code, PyObject *value) {
  if (code == 'Q') {
    unsigned long long word = PyLong_AsUnsignedLongLong(value);
    if (word == (unsigned long long)-1 && PyErr_Occurred()) return -1;
    memcpy(at, &word, 8);
    return 0;
  }
  long long word = PyLong_AsLongLong(value);
  if (word == -1 && PyErr_Occurred()) return -1;
  if ((code == 'i' && word != (int32_t)word) || (code == 'I' && word != (uint32_t)word)) {
    PyErr_SetString(PyExc_OverflowError, "the number does not fit its field");
    return -1;
  }
  memcpy(at, &word, code == 'q' ? 8 : 4);  // little-endian, as the device
  return 0;
}

static int write_double(unsigned char *at, double value) {
  float word = (float)value;
  if (isinf(word) && !isinf(value)) {
    PyErr_SetString(PyExc_OverflowError, "the number does not fit float32");
    return -1;
  }
  memcpy(at, &word, 4);
  return 0;
}

static int write_float(unsigned char *at, PyObject *value) {
  double number = PyFloat_AsDouble(value);
  return number == -1.0 && PyErr_Occurred() ? -1 : write_double(at, number);
}

static int write_value(unsigned char *at, char code, const Value *value) {
  if (value->number != NULL) {
    return code == 'f' ? write_float(at, value->number) : write_integer(at, code, value->number);
  }
  if (code == 'f') return write_double(at, value->product);
  if (code != 'Q') {
    PyErr_Format(PyExc_TypeError, "an address for a field of format %c", code);
    return -1;
  }
  memcpy(at, &value->address, 8);
  return 0;
}

static PyObject *entry_of(const Sender *self, const unsigned char *parameters) {
  PyObject *bytes = PyBytes_FromStringAndSize((const char *)parameters, self->size);
  if (bytes == NULL) return NULL;
  PyObject *entry = PyTuple_Pack(3, self->launch, bytes, self->stream);
  Py_DECREF(bytes);
  return entry;
}

static int note(const Sender *self, const unsigned char *parameters) {
  PyObject *entry = self->entry != NULL ? Py_NewRef(self->entry) : entry_of(self, parameters);
  if (entry == NULL) return -1;
  PyObject *done = PyObject_CallFunctionObjArgs(self->record, entry, NULL);
  Py_DECREF(entry);
  if (done == NULL) return -1;
  Py_DECREF(done);
  done = PyObject_CallNoArgs(self->tick);
  if (done == NULL) return -1;
  Py_DECREF(done);
  return 0;
}

int fill(const Sender *self, const Value *values, Parameters *parameters) {
  memcpy(parameters->bytes, self->parameters, (size_t)self->size);
  for (Py_ssize_t i = 0; i < self->count; i++) {
    if (write_value(parameters->bytes + self->fields[i].offset, self->fields[i].code, &values[i])) return -1;
  }
  return 0;
}

int launch(const Sender *self, Parameters *parameters, int *code) {
  if (note(self, parameters->bytes)) return -1;
  void *pointers[1] = {parameters->bytes};
  Py_BEGIN_ALLOW_THREADS  // a full queue waits
  *code = self->call(self->config, self->function, pointers, NULL);
  Py_END_ALLOW_THREADS
  return 0;
}

static PyObject *send(PyObject *object, PyObject *const *given, Py_ssize_t count) {
  const Sender *self = (const Sender *)object;
  if (count != self->count) {
    return PyErr_Format(PyExc_TypeError, "send: %zd values, expected %zd", count, self->count);
  }
  Value values[MOST_FIELDS];
  for (Py_ssize_t i = 0; i < count; i++) values[i] = (Value){given[i], 0, 0.0};
  Parameters parameters;
  int code;
  return fill(self, values, &parameters) || launch(self, &parameters, &code) ? NULL : PyLong_FromLong(code);
}

static int set_fields(Sender *self, PyObject *fields) {
  Py_ssize_t count = PyTuple_Size(fields);
  if (count < 0) return -1;
  if (count > MOST_FIELDS) {
    PyErr_Format(PyExc_ValueError, "fields: %zd, expected at most %d", count, MOST_FIELDS);
    return -1;
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    Py_ssize_t offset;
    int code;
    if (!PyArg_ParseTuple(PyTuple_GetItem(fields, i), "nC", &offset, &code)) return -1;
    int bytes = code < 128 ? size_of((char)code) : 0;
    if (bytes == 0 || offset < 0 || offset + bytes > self->size) {
      PyErr_Format(PyExc_ValueError, "fields: %c at %zd of %zd bytes", code, offset, self->size);
      return -1;
    }
    self->fields[i] = (Field){(uint32_t)offset, (char)code};
  }
  self->count = count;
  return 0;
}

static int set_parameters(Sender *self, const char *parameters) {
  self->parameters = PyMem_Malloc(self->size ? (size_t)self->size : 1);
  if (self->parameters == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  memcpy(self->parameters, parameters, (size_t)self->size);
  return 0;
}

static PyObject *new_sender(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
  static char *names[] = {"call",   "config", "function", "parameters", "fields", "launch",
                          "stream", "record", "tick",     "kept",       NULL};
  unsigned long long call, config, function;
  const char *parameters;
  Py_ssize_t size;
  PyObject *fields, *launched, *stream, *record, *tick, *kept;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "KKKy#O!OOOOO", names, &call, &config, &function, &parameters,
                                   &size, &PyTuple_Type, &fields, &launched, &stream, &record, &tick, &kept)) {
    return NULL;
  }
  if (size > MOST_BYTES) {
    return PyErr_Format(PyExc_ValueError, "parameters: %zd bytes, expected at most %d", size, MOST_BYTES);
  }
  allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  Sender *self = (Sender *)allocate(type, 0);
  if (self == NULL) return NULL;
  self->call = (LaunchKernelEx)(uintptr_t)call;
  self->config = (const void *)(uintptr_t)config;
  self->function = (void *)(uintptr_t)function;
  self->size = size;
  self->launch = Py_NewRef(launched);
  self->stream = Py_NewRef(stream);
  self->record = Py_NewRef(record);
  self->tick = Py_NewRef(tick);
  self->kept = Py_NewRef(kept);
  int failed = set_parameters(self, parameters) || set_fields(self, fields);
  if (!failed && self->count == 0) {
    self->entry = entry_of(self, self->parameters);
    failed = self->entry == NULL;
  }
  if (failed) {
    Py_DECREF((PyObject *)self);
    return NULL;
  }
  return (PyObject *)self;
}

static void free_sender(PyObject *object) {
  clear_all(object, REFERENCES(Sender, launch, entry));
  PyMem_Free(((Sender *)object)->parameters);
  release(object);
}

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
