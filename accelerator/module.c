#include "sender.h"

enum { ABI = 4 };

static PyObject **first_of(PyObject *object, References references) {
  return (PyObject **)((char *)object + references.offset);
}

int visit_all(PyObject *object, References references, visitproc visit, void *arg) {
  for (size_t i = 0; i < references.count; i++) Py_VISIT(first_of(object, references)[i]);
  Py_VISIT(Py_TYPE(object));
  return 0;
}

void clear_all(PyObject *object, References references) {
  for (size_t i = 0; i < references.count; i++) Py_CLEAR(first_of(object, references)[i]);
}

void release(PyObject *object) {
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
  return PyModule_AddIntMacro(module, ABI) || PyModule_AddIntMacro(module, MOST_SLOTS) ||
                 PyModule_AddIntMacro(module, MOST_TENSORS) || PyModule_AddIntMacro(module, MOST_FACTORS) ||
                 PyModule_AddIntMacro(module, MOST_KEYED) || PyModule_AddIntMacro(module, MOST_LAUNCHES) ||
                 add_type(module, "Sender", &sender_spec) || add_type(module, "Walk", &walk_spec) ||
                 add_type(module, "Paths", &paths_spec)
             ? -1
             : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, start}, {0, NULL}};

static PyMethodDef methods[] = {
    {"guard", guard_of, METH_O, "guard(check): the method of torch's guards, but False where it would throw."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "cubin_runtime_accelerator", "Launches of cubin_runtime in C.", 0, methods, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_cubin_runtime_accelerator(void) { return PyModuleDef_Init(&module); }
