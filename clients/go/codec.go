package kvsidecar

import "google.golang.org/protobuf/proto"

// codec is the default of newer gRPC versions; the default in Debian 12 marshals with a package that is too old for
// current generated code.
type codec struct{}

func (codec) Marshal(message any) ([]byte, error) { return proto.Marshal(message.(proto.Message)) }

func (codec) Unmarshal(data []byte, message any) error {
	return proto.Unmarshal(data, message.(proto.Message))
}

func (codec) Name() string { return "proto" }
