module kvsidecar

go 1.19
