#!/bin/sh
# Stands where bishengir-compile looks for CANN's code generator, which isn't public. The HIVM it is handed is
# the compiler's final word on memory and synchronisation: keep that as the "object file", and generate nothing.
for argument in "$@"; do
    case "$previous:$argument" in
        *:--version) echo "hivmc 1.2.0"; exit 0 ;;
        -o:*) object=$argument ;;
        *:*.mlir) hivm=$argument ;;
    esac
    previous=$argument
done
exec cp "$hivm" "${object%.o}.o"
