package kvsidecar

import (
	"fmt"
	"math"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// refuseNegative refuses numbers that were negative before a uint32(n) conversion: -3 would become 4294967293, which
// limits nothing. So it refuses all values that exceed an int32, except a max_tokens that requests the rest of the
// context.
func refuseNegative(message protoreflect.Message) error {
	var found error
	message.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		switch {
		case field.IsList() || field.IsMap():
		case field.Name() == "max_tokens" && value.Uint() == RestOfContext:
		case field.Kind() == protoreflect.MessageKind:
			found = refuseNegative(value.Message())
		case field.Kind() == protoreflect.Uint32Kind && value.Uint() > math.MaxInt32:
			found = refusal(fmt.Sprintf("%s is %d (%d as an int32); whole numbers from %d to %d are allowed",
				field.Name(), value.Uint(), int32(value.Uint()), least(field), math.MaxInt32))
		}
		return found == nil
	})
	return found
}

// RestOfContext as MaxTokens allows an answer to fill the rest of the context.
const RestOfContext = math.MaxUint32

func least(field protoreflect.FieldDescriptor) int {
	switch field.Name() {
	case "max_tokens", "ttl_seconds", "retain_seconds":
		return 1
	}
	return 0
}
