/* Comes before cffi's own part of the library.
 *
 * That part guards the start of Python with a field of PyCapsule_Type, which it expects to find zero. In a process
 * whose Python has run for a while it need not be (before Python 3.12 the field is a cache's tag), and then the guard
 * never opens. Python is started by library.c before cffi is called, so a guard of our own serves as well.
 */
#include <Python.h>

static PyTypeObject normgrad_start_guard;
#define PyCapsule_Type normgrad_start_guard
