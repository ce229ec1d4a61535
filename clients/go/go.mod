module kvsidecar

go 1.19

// The oldest versions that it is built and tested with: those of Debian 12.
require (
	google.golang.org/genproto v0.0.0-20200526211855-cb27e3aa2013
	google.golang.org/grpc v1.33.3
	google.golang.org/protobuf v1.28.1
)
