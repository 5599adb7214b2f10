// The last launches, as cubin_runtime/launch/history.py keeps them in Python; the two are tested alike.

#include "sender.h"

#include <string.h>

enum { KEPT = 16 };

// A launch, its stream and its parameters; `larger`: bytes of those that do not fit, else NULL.
typedef struct {
  PyObject *launch, *stream, *larger;
  Py_ssize_t size;
  char parameters[MOST_BYTES];
} Entry;

struct Ring {
  PyObject_HEAD
  unsigned long long launches;
  Entry entry[KEPT];
};

// What the entry held is let go last: that may run Python.
static void hold(Entry *entry, PyObject *launch, PyObject *stream, PyObject *larger) {
  PyObject *old[] = {entry->launch, entry->stream, entry->larger};
  entry->launch = Py_XNewRef(launch);
  entry->stream = Py_XNewRef(stream);
  entry->larger = Py_XNewRef(larger);
  for (int i = 0; i < 3; i++) Py_XDECREF(old[i]);
}

void note(Ring *self, PyObject *launch, PyObject *stream, const char *parameters, Py_ssize_t size) {
  Entry *entry = &self->entry[self->launches++ % KEPT];
  entry->size = size;
  memcpy(entry->parameters, parameters, (size_t)size);
  hold(entry, launch, stream, NULL);
}

static PyObject *record(PyObject *object, PyObject *entry) {
  Ring *self = (Ring *)object;
  PyObject *launch, *bytes, *stream;
  if (!PyTuple_Check(entry)) return PyErr_Format(PyExc_TypeError, "record: expected a tuple");
  if (!PyArg_ParseTuple(entry, "OSO", &launch, &bytes, &stream)) return NULL;
  if (PyBytes_Size(bytes) <= MOST_BYTES) note(self, launch, stream, PyBytes_AsString(bytes), PyBytes_Size(bytes));
  else hold(&self->entry[self->launches++ % KEPT], launch, stream, bytes);
  return Py_NewRef(Py_None);
}

static PyObject *item_of(const Entry *entry) {
  if (entry->larger != NULL) return PyTuple_Pack(3, entry->launch, entry->larger, entry->stream);
  return Py_BuildValue("(Oy#O)", entry->launch, entry->parameters, entry->size, entry->stream);
}

static PyObject *entries(PyObject *object, PyObject *unused) {
  const Ring *self = (const Ring *)object;
  PyObject *list = PyList_New(0);
  for (unsigned i = 0; i < KEPT && list != NULL; i++) {
    const Entry *entry = &self->entry[(self->launches + i) % KEPT];
    if (entry->launch == NULL) continue;
    PyObject *item = item_of(entry);
    if (item == NULL || PyList_Append(list, item)) Py_CLEAR(list);
    Py_XDECREF(item);
  }
  return list;
}

static int clear_ring(PyObject *object) {
  for (int i = 0; i < KEPT; i++) hold(&((Ring *)object)->entry[i], NULL, NULL, NULL);
  return 0;
}

static PyObject *clear(PyObject *object, PyObject *unused) {
  clear_ring(object);
  return Py_NewRef(Py_None);
}

static int visit_ring(PyObject *object, visitproc visit, void *arg) {
  for (int i = 0; i < KEPT; i++) {
    const Entry *entry = &((Ring *)object)->entry[i];
    Py_VISIT(entry->launch);
    Py_VISIT(entry->stream);
    Py_VISIT(entry->larger);
  }
  Py_VISIT(Py_TYPE(object));
  return 0;
}

static void free_ring(PyObject *object) {
  PyObject_GC_UnTrack(object);
  clear_ring(object);
  release(object, (References){0, 0});
}

int is_ring(PyObject *object) { return PyType_GetSlot(Py_TYPE(object), Py_tp_dealloc) == (void *)free_ring; }

static PyObject *get_launches(PyObject *object, void *unused) {
  return PyLong_FromUnsignedLongLong(((Ring *)object)->launches);
}

static PyMethodDef methods[] = {
    {"record", record, METH_O, "record((launch, parameters, stream)): keep it as the last."},
    {"entries", entries, METH_NOARGS, "entries(): what is kept, the last at the end."},
    {"clear", clear, METH_NOARGS, "clear(): forget what is kept."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"launches", get_launches, NULL, "How many were recorded.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The last launches."},  {Py_tp_dealloc, free_ring},   {Py_tp_traverse, visit_ring},
    {Py_tp_clear, clear_ring},          {Py_tp_methods, methods},     {Py_tp_getset, properties},
    {0, NULL},
};

PyType_Spec ring_spec = {
    "cubin_runtime_accelerator.Ring", sizeof(Ring), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
};
