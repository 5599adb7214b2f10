#include "sender.h"

#include <string.h>

enum { ABI = 8 };

static PyObject **first_of(PyObject *object, References references) {
  return (PyObject **)((char *)object + references.offset);
}

PyObject *hold_all(PyObject *object, References references, int parsed) {
  PyObject **first = first_of(object, references);
  if (!parsed) memset(first, 0, references.count * sizeof *first);
  for (size_t i = 0; i < references.count; i++) Py_XINCREF(first[i]);
  if (!parsed) Py_CLEAR(object);
  return object;
}

int visit_all(PyObject *object, References references, visitproc visit, void *arg) {
  for (size_t i = 0; i < references.count; i++) Py_VISIT(first_of(object, references)[i]);
  Py_VISIT(Py_TYPE(object));
  return 0;
}

int clear_all(PyObject *object, References references) {
  for (size_t i = 0; i < references.count; i++) Py_CLEAR(first_of(object, references)[i]);
  return 0;
}

PyObject *tuple_of(PyObject *const *items, Py_ssize_t count) {
  PyObject *tuple = PyTuple_New(count);
  for (Py_ssize_t i = 0; i < count && tuple != NULL; i++) PyTuple_SetItem(tuple, i, Py_NewRef(items[i]));
  return tuple;
}

void *allocate(PyTypeObject *type) { return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0); }

void release(PyObject *object, References references) {
  clear_all(object, references);
  PyTypeObject *type = Py_TYPE(object);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF((PyObject *)type);
}

static int add_type(PyObject *module, const char *name, PyType_Spec *spec) {
  PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
  int failed = PyModule_AddObjectRef(module, name, type);  // of NULL, too
  Py_XDECREF(type);
  return failed;
}

static int start(PyObject *module) {
  return start_forms() || PyModule_AddIntMacro(module, ABI) || PyModule_AddIntMacro(module, MOST_SLOTS) ||
                 PyModule_AddIntMacro(module, MOST_TENSORS) || PyModule_AddIntMacro(module, MOST_KEYED) ||
                 PyModule_AddIntMacro(module, MOST_LAUNCHES) ||
                 add_type(module, "Sender", &sender_spec) || add_type(module, "Walk", &walk_spec) ||
                 add_type(module, "Paths", &paths_spec) || add_type(module, "Ring", &ring_spec)
             ? -1
             : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, start}, {0, NULL}};

static PyMethodDef methods[] = {
    {"readable", is_readable, METH_O, "readable(exchange_api): whether it is one of DLPack 1."},
    {"form", form_of, METH_VARARGS, "form(exchange_api, tensor): its form, as a row of a table."},
    {"alike", alike_of, METH_VARARGS, "alike(exchange_api, grad_mode, forms): a function that tells whether tensors have them."},
    {"same_stream", same_stream, METH_O, "same_stream(query): whether a stream is the same and does not capture."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "cubin_runtime_accelerator", "Launches of cubin_runtime in C.", 0, methods, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_cubin_runtime_accelerator(void) { return PyModuleDef_Init(&module); }
